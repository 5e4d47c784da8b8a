"""A URDF as a spec: meshes found, nothing fused, drawn shapes apart from those that touch.

MuJoCo reads the rest: joints, limits, inertias, `<mimic>` as an equality. It reads no Collada: links whose
drawn meshes are in such a format are drawn by the shapes that touch.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree
from xml.parsers import expat

import mujoco

from robot_rl.core.errors import ModelError

MESHES = (".stl", ".obj", ".msh")
"""Suffixes of the meshes that MuJoCo reads."""
_COMPILER = {"strippath": "false", "fusestatic": "false", "discardvisual": "false", "balanceinertia": "true"}
"""Paths stay whole, links on fixed joints stay bodies, which may carry the tool; bad inertias change."""
_HIDDEN = 3
"""Group of geoms that pictures do not show."""


def read_urdf(path: Path, robot_name: str) -> mujoco.MjSpec:
    """Returns the spec of a URDF; it has no actuators.

    Raises:
        ModelError: no URDF, a mesh that is not found, or one that touches and is in a format MuJoCo lacks.
    """
    at = f"robot {robot_name}: {path}"
    root = parse(path, at)
    if path.suffix == ".xacro" or _has_macros(root):
        raise ModelError(f"{at}: has xacro's macros. Expand them: xacro {path.name} > {path.name[:-6]}.urdf")
    folder = path.resolve().parent
    missing = [each for link in root.iter("link") for each in _resolve_meshes(link, folder, at)]
    if missing:
        link, name, tried = missing[0]
        others = ", ".join(dict.fromkeys(other for _, other, _ in missing if other != name))
        raise ModelError(
            f"{at}: link {link!r}: no mesh {name}; looked for {', '.join(map(str, tried))}. "
            f"{f'Missing too: {others}. ' if others else ''}Put the URDF into its package's folder, or write "
            "paths relative to the URDF."
        )
    extension = root.find("mujoco")
    if extension is None:
        extension = ElementTree.SubElement(root, "mujoco")
    compiler = extension.find("compiler")
    if compiler is None:
        compiler = ElementTree.SubElement(extension, "compiler")
    compiler.attrib.update(_COMPILER)
    try:
        spec = mujoco.MjSpec.from_string(ElementTree.tostring(root, encoding="unicode"))
    except ValueError as error:
        raise ModelError(f"{at}: MuJoCo cannot read it: {error}") from error
    _hide_what_touches(spec)
    return spec


def parse(path: Path, at: str) -> ElementTree.Element:
    """Returns the root of a URDF; `at` begins the message of an error.

    Names keep their prefixes: many URDFs have `drake:acceleration` and declare no such prefix.

    Raises:
        ModelError: it cannot be read, or is no XML.
    """
    builder, parser = ElementTree.TreeBuilder(), expat.ParserCreate()
    parser.StartElementHandler, parser.EndElementHandler = builder.start, builder.end
    parser.CharacterDataHandler = builder.data
    try:
        parser.Parse(path.read_bytes(), True)
    except OSError as error:
        raise ModelError(f"{at}: cannot be read: {error.strerror}.") from error
    except expat.ExpatError as error:
        raise ModelError(f"{at}: not XML: {error}") from error
    return builder.close()


def _has_macros(root: ElementTree.Element) -> bool:
    """Returns whether an element is of xacro, by the prefix `xacro` or one that stands for it."""
    pairs = [pair for element in root.iter() for pair in element.items()]
    prefixes = {key.removeprefix("xmlns:") for key, value in pairs if value.endswith("/xacro")}
    return any(element.tag.partition(":")[0] in {"xacro", *prefixes} for element in root.iter())


def _resolve_meshes(
    link: ElementTree.Element, folder: Path, at: str
) -> Iterator[tuple[str, str, list[Path]]]:
    """Writes whole paths of meshes; takes out the visuals whose format MuJoCo does not read.

    Yields the meshes that are missing: the link, the name, and where it was looked for.
    """
    for shape in [*link.findall("visual"), *link.findall("collision")]:
        for mesh in list(shape.iter("mesh")):
            name = mesh.get("filename", "")
            if Path(name).suffix.lower() in MESHES:
                tried = list(_places(name, folder))
                found = next((place for place in tried if place.is_file()), None)
                if found is None:
                    yield link.get("name", ""), name, tried
                mesh.set("filename", str(found))
            elif shape.tag == "visual":
                link.remove(shape)
            else:
                raise ModelError(
                    f"{at}: link {link.get('name')!r}: the collision mesh {name} must be one of "
                    f"{', '.join(MESHES)}. Convert it, or put a box, cylinder or sphere in its place."
                )


def _places(name: str, folder: Path) -> Iterator[Path]:
    kind, separator, rest = name.partition("://")
    if not separator:
        yield folder / name
    elif kind != "package":
        yield Path(rest)
    else:
        above = (folder, *folder.parents)
        inside = rest.partition("/")[2]  # of the package
        prefixes = filter(None, os.environ.get("AMENT_PREFIX_PATH", "").split(os.pathsep))
        yield from (each / rest for each in above)
        yield from (Path(prefix) / "share" / rest for prefix in prefixes)
        yield from (each / inside for each in above)  # the package's folder has another name


def _hide_what_touches(spec: mujoco.MjSpec) -> None:
    """Draws the visual shapes of a link where it has some, and those that touch where it has none."""
    drawn = {geom.parent.name for geom in spec.geoms if not (geom.contype or geom.conaffinity)}
    for geom in spec.geoms:
        if (geom.contype or geom.conaffinity) and geom.parent.name in drawn:
            geom.group = _HIDDEN
