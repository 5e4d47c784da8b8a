"use strict";
// Draws what /state says, once a second. All text is set as text, so that no name can become a part of the page.

const $ = (id) => document.getElementById(id);

function element(name, { text, cls, children = [], ...more } = {}) {
  const made = document.createElement(name);
  if (text !== undefined) made.textContent = text;
  if (cls) made.className = cls;
  for (const [key, value] of Object.entries(more)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

const cell = (text, cls) => element("td", { text, cls });
const percent = (share) => (share === null || share === undefined ? "-" : `${(100 * share).toFixed(1)} %`);

const at = (seconds) => new Date(1000 * seconds).toLocaleTimeString("en-GB");

// Keeps the elements of items that did not change, so that a click or the focus on one is not lost.
function show(parent, items, make, empty) {
  const before = new Map([...parent.children].map((one) => [one.dataset.is, one]));
  const made = items.map((item) => {
    const is = JSON.stringify(item);
    const kept = before.get(is) || make(item);
    kept.dataset.is = is;
    return kept;
  });
  const wanted = made.length ? made : [before.get("") || empty()];
  if (!made.length) wanted[0].dataset.is = "";
  if (wanted.length !== parent.children.length || wanted.some((one, place) => one !== parent.children[place])) parent.replaceChildren(...wanted);
}

function rows(table, items, make, empty) {
  const none = () => element("tr", { children: [element("td", { text: empty, cls: "empty", colspan: "9" })] });
  show($(table).tBodies[0], items, make, none);
}

function curve(points) {
  const space = "http://www.w3.org/2000/svg";
  const svg = document.createElementNS(space, "svg");
  svg.setAttribute("class", "curve");
  svg.setAttribute("viewBox", "0 0 100 100");
  svg.setAttribute("preserveAspectRatio", "none");
  if (points.length > 1) {
    const last = points[points.length - 1][0] || 1;
    const line = document.createElementNS(space, "polyline");
    line.setAttribute("points", points.map(([at, share]) => `${(100 * at) / last},${98 - 96 * share}`).join(" "));
    svg.append(line);
  }
  return svg;
}

// Pictures, by what is fetched: a card that is drawn again keeps them, and what they show.
const pictures = new Map();

function picture(one, camera) {
  const path = `${place(one)}/cameras/${encodeURIComponent(camera)}`;
  if (!pictures.has(path)) {
    const canvas = element("canvas", { role: "img", "aria-label": `picture of ${camera}`, width: "320", height: "240" });
    const made = element("figure", { "data-camera": camera, children: [canvas, element("figcaption", { cls: "small", text: camera })] });
    pictures.set(path, made);
    setTimeout(() => follow(made, path, camera));
  }
  return pictures.get(path);
}

const pause = (seconds) => new Promise((done) => setTimeout(done, 1000 * seconds));

// Draws what a camera sees, as often as the server has something new, while the page and the arm are there.
async function follow(figure, path, camera) {
  const [canvas, caption] = figure.children;
  let takenAt = null;
  for (; figure.isConnected; await pause(0.3)) {
    if (document.hidden) continue;
    let problem = "";
    try {
      const answer = await fetch(path, { signal: AbortSignal.timeout(4000) });
      if (!answer.ok) problem = `refused (${answer.status})`;
      else if (answer.status === 202) problem = (await answer.json()).problem;
      else {
        const bitmap = await createImageBitmap(await answer.blob());
        takenAt = performance.now() - 1000 * answer.headers.get("X-Robot-RL-Age");
        [canvas.width, canvas.height] = [bitmap.width, bitmap.height];
        canvas.getContext("2d").drawImage(bitmap, 0, 0);
      }
    } catch (error) {
      problem = `no answer: ${error.message}`;
    }
    const age = takenAt === null ? null : (performance.now() - takenAt) / 1000;
    const isOld = age === null || age > 2;
    figure.className = isOld ? "old" : "";
    caption.textContent = [camera, age === null ? "" : `${age.toFixed(1)} s old`, problem].filter(Boolean).join(", ");
    caption.className = isOld ? "small warn" : "small";
  }
  pictures.delete(path);
}

function arm(one) {
  const cls = { running: "ok", stopped: "bad", silent: "bad" }[one.phase] || "warn";
  const card = element("div", { cls: "card", "data-arm": key(one) });
  card.append(element("h3", { text: key(one, one.station) }), element("p", { text: one.phase, cls }));
  if (one.reason) card.append(element("p", { text: one.reason, cls: "small" }));
  card.append(element("p", { cls: "small joints" }), element("p", { cls: "small rate" }));
  card.append(element("div", { cls: "pictures", children: one.cameras.map((camera) => picture(one, camera)) }));
  if (one.has_scene) card.append(element("a", { text: "Scene", href: `${place(one)}/scene/`, target: "_blank", rel: "noopener" }));
  if (one.phase !== "stopped" && one.phase !== "silent") {
    const button = element("button", { text: "Stop", cls: "danger" });
    button.onclick = () => ask(`Stop ${key(one, one.station)}? It stays stopped until somebody clears it.`, "Stop", `${place(one)}/stop`);
    card.append(button);
  }
  return card;
}

function device(one) {
  const held = one.held.map((lease) => `${lease.holder}, since ${at(lease.since_s)}${lease.wanted_by ? `, wanted by ${lease.wanted_by}` : ""}`);
  const health = element("td");
  if (one.stopped) {
    const button = element("button", { text: "Clear" });
    button.onclick = () => ask(`Clear ${key(one, one.name)}? Look at it first: ${one.stopped.reason}`, "Clear", one.on ? `nodes/${one.on}/${one.name}/clear` : `devices/${one.name}/clear`);
    health.append(element("div", { text: `stopped: ${one.stopped.reason}`, cls: "bad" }), button);
  } else if (one.refusal) health.append(element("div", { text: one.refusal, cls: "warn small" }));
  else health.append(element("div", { text: "ok", cls: "ok" }));
  const labels = Object.entries(one.labels).map(([name, value]) => `${name} ${value}`).join(", ");
  return element("tr", {
    "data-device": key(one, one.name),
    children: [
      cell(one.name), cell(one.real ? "real robot" : one.kind), cell(`${one.free}/${one.slots}`),
      cell(held.join("; ") || "nobody"), health, cell(labels, "small"), cell(one.on || one.node || "-"),
    ],
  });
}

function run(one) {
  const where = cell(one.on || "-");
  if (one.state === "unreadable") return element("tr", { "data-run": key(one, one.name), children: [cell(one.name), where, element("td", { text: one.problem, cls: "bad small", colspan: "6" })] });
  const cls = { running: "ok", stopped: "warn" }[one.state];
  const state = one.state === "finished" ? "finished" : `${one.state}, wrote at ${at(one.written_s)}`;
  const seen = one.curve.length ? one.curve[one.curve.length - 1][1] : one.base;
  const drawn = element("td");
  drawn.append(curve(one.curve));
  return element("tr", {
    "data-run": key(one, one.name),
    children: [
      cell(one.name), where, cell(one.task || "-"), cell(state, cls), cell(one.phase || "-"),
      cell(one.env_steps.toLocaleString("en")), cell(percent(one.final ?? seen)), drawn,
    ],
  });
}

// What is on another machine has its name too.
const place = (arm) => `${arm.on ? `nodes/${arm.on}` : "arms"}/${encodeURIComponent(arm.id)}`;
const key = (one, name = one.id) => (one.on ? `${name} on ${one.on}` : name);

const count = (number, what) => `${number} ${what}${number === 1 ? "" : "s"}`;

function draw(state) {
  const nodes = state.nodes.filter((at) => !at.is_here); // an agent of this machine shows the same once more
  const silent = nodes.filter((at) => at.silent_s > 4).map((at) => `${at.name} says nothing: what is shown of it is old`);
  const everywhere = (what) => [state, ...nodes].flatMap((at) => (at[what] || []).map((one) => ({ ...one, on: at.name || "" })));
  const placed = everywhere("arms");
  const arms = placed.map(({ position_rad, rate_hz, ...still }) => still);
  show($("arms"), arms, arm, () => element("p", { text: "No arm is up.", cls: "empty" }));
  for (const one of placed) {
    const card = document.querySelector(`[data-arm="${CSS.escape(key(one))}"]`);
    card.querySelector(".joints").textContent = one.position_rad.length ? `${one.position_rad.map((angle) => angle.toFixed(2)).join("  ")} rad` : "";
    card.querySelector(".rate").textContent = one.rate_hz ? `${one.rate_hz.toFixed(0)} Hz${one.wanted_hz ? ` of ${one.wanted_hz}` : ""}` : "";
  }
  // when a lease began differs in the last bits from look to look
  const devices = everywhere("devices").map((one) => ({ ...one, held: one.held.map((lease) => ({ ...lease, since_s: Math.round(lease.since_s) })) }));
  rows("devices", devices, device, "none");
  const waiting = everywhere("waiting");
  rows("waiting", waiting, (one) => element("tr", { children: [cell(key(one, one.device)), cell(one.priority), cell(one.who)] }), "nobody waits");
  const runs = everywhere("runs").sort((one, other) => (other.written_s || 0) - (one.written_s || 0));
  rows("runs", runs, run, "no runs yet");
  const running = runs.filter((one) => one.state === "running").length;
  $("totals").textContent = `${count(devices.length, "device")}, ${count(arms.length, "arm")} up, ${count(running, "run")}, ${waiting.length} waiting, ${count(nodes.length, "other machine")}`;
  $("totals").className = "";
  $("problems").textContent = [...silent, ...[state, ...nodes].flatMap((at) => at.problems || [])].join("; ");
}

let order = null;

function ask(question, word, path) {
  order = path;
  $("question").textContent = question;
  $("go").textContent = word;
  $("refused").textContent = "";
  $("confirm").showModal();
  $("by").focus();
}

$("cancel").onclick = () => $("confirm").close();
$("confirm").querySelector("form").onsubmit = async (event) => {
  event.preventDefault();
  try {
    const answer = await fetch(order, {
      method: "POST",
      headers: { "Content-Type": "application/json", "X-Robot-RL": "1" },
      body: JSON.stringify({ by: $("by").value }),
      signal: AbortSignal.timeout(10000),
    });
    if (answer.ok) $("confirm").close();
    else $("refused").textContent = (await answer.json().catch(() => ({}))).error || `refused (${answer.status})`;
  } catch (error) {
    $("refused").textContent = `NOT DONE, no answer: ${error.message}. Use the e-stop button, or robot-rl arm stop.`;
  }
  await look();
};

async function look() {
  try {
    const answer = await fetch("state", { signal: AbortSignal.timeout(5000) });
    if (!answer.ok) throw new Error(await answer.text());
    draw(await answer.json());
  } catch (error) {
    $("totals").textContent = `no connection, what is below is old: ${error.message}`;
    $("totals").className = "bad";
  }
}

async function watch() {
  await look();
  setTimeout(watch, 1000);
}

watch();
