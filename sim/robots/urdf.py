"""A URDF as a spec: meshes found, nothing fused, drawn shapes apart from those that touch.

MuJoCo reads the rest: joints, limits, inertias, `<mimic>` as an equality. It reads no Collada: links whose
drawn meshes are in such a format are drawn by the shapes that touch.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

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
    try:
        root = ElementTree.parse(path).getroot()
    except ElementTree.ParseError as error:
        raise ModelError(f"{at}: not XML: {error}") from error
    if path.suffix == ".xacro" or "xacro" in "".join(element.tag for element in root.iter()):
        raise ModelError(f"{at}: has xacro's macros. Expand them: xacro {path.name} > {path.name[:-6]}.urdf")
    for link in root.iter("link"):
        _resolve_meshes(link, path.resolve().parent, at)
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


def _resolve_meshes(link: ElementTree.Element, folder: Path, at: str) -> None:
    """Writes whole paths of meshes; takes out the visuals whose format MuJoCo does not read."""
    for shape in [*link.findall("visual"), *link.findall("collision")]:
        for mesh in list(shape.iter("mesh")):
            name = mesh.get("filename", "")
            if Path(name).suffix.lower() in MESHES:
                mesh.set("filename", str(_mesh(name, folder, f"{at}: link {link.get('name')!r}")))
            elif shape.tag == "visual":
                link.remove(shape)
            else:
                raise ModelError(
                    f"{at}: link {link.get('name')!r}: the collision mesh {name} must be one of "
                    f"{', '.join(MESHES)}. Convert it, or put a box, cylinder or sphere in its place."
                )


def _mesh(name: str, folder: Path, at: str) -> Path:
    """Returns where a mesh is; `package://` is looked for in the URDF's folders and in AMENT_PREFIX_PATH."""
    tried = list(_places(name, folder))
    for place in tried:
        if place.is_file():
            return place
    raise ModelError(
        f"{at}: no mesh {name}; looked for {', '.join(map(str, tried))}. Put the URDF into its package's "
        "folder, or write paths relative to the URDF."
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
