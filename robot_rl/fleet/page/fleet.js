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
const ago = (seconds) => (seconds < 90 ? `${Math.round(seconds)} s` : seconds < 5400 ? `${Math.round(seconds / 60)} min` : `${Math.round(seconds / 3600)} h`);

function rows(table, made, empty) {
  const body = $(table).tBodies[0];
  const none = element("tr", { children: [element("td", { text: empty, cls: "empty", colspan: "9" })] });
  body.replaceChildren(...(made.length ? made : [none]));
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

function arm(one) {
  const cls = { running: "ok", stopped: "bad", silent: "bad" }[one.phase] || "warn";
  const joints = one.position_rad.map((angle) => angle.toFixed(2)).join("  ");
  const card = element("div", { cls: "card", "data-arm": one.id });
  card.append(element("h3", { text: one.station }), element("p", { text: one.phase, cls }));
  if (one.reason) card.append(element("p", { text: one.reason, cls: "small" }));
  if (joints) card.append(element("p", { text: `${joints} rad`, cls: "small" }));
  if (one.phase !== "stopped" && one.phase !== "silent") {
    const button = element("button", { text: "Stop", cls: "danger" });
    button.onclick = () => ask(`Stop ${one.station}? It stays stopped until somebody clears it.`, "Stop", `arms/${one.id}/stop`);
    card.append(button);
  }
  return card;
}

function device(one, now) {
  const held = one.held.map((lease) => `${lease.holder} (${ago(now - lease.since_s)})${lease.wanted_by ? `, wanted by ${lease.wanted_by}` : ""}`);
  const health = element("td");
  if (one.stopped) {
    const button = element("button", { text: "Clear" });
    button.onclick = () => ask(`Clear ${one.name}? Look at it first: ${one.stopped.reason}`, "Clear", `devices/${one.name}/clear`);
    health.append(element("div", { text: `stopped: ${one.stopped.reason}`, cls: "bad" }), button);
  } else if (one.refusal) health.append(element("div", { text: one.refusal, cls: "warn small" }));
  else health.append(element("div", { text: "ok", cls: "ok" }));
  const labels = Object.entries(one.labels).map(([name, value]) => `${name} ${value}`).join(", ");
  return element("tr", {
    "data-device": one.name,
    children: [
      cell(one.name), cell(one.real ? "real robot" : one.kind), cell(`${one.free}/${one.slots}`),
      cell(held.join("; ") || "nobody"), health, cell(labels, "small"), cell(one.node || "-"),
    ],
  });
}

function run(one, now) {
  if (one.state === "unreadable") return element("tr", { children: [cell(one.name), cell(one.problem, "bad small")] });
  const cls = { running: "ok", stopped: "warn" }[one.state];
  const state = one.state === "finished" ? "finished" : `${one.state}, ${ago(now - one.written_s)} ago`;
  const seen = one.curve.length ? one.curve[one.curve.length - 1][1] : one.base;
  const drawn = element("td");
  drawn.append(curve(one.curve));
  return element("tr", {
    "data-run": one.name,
    children: [
      cell(one.name), cell(one.task || "-"), cell(state, cls), cell(one.phase || "-"),
      cell(one.env_steps.toLocaleString("en")), cell(percent(one.final ?? seen)), drawn,
    ],
  });
}

function draw(state) {
  $("arms").replaceChildren(...(state.arms.length ? state.arms.map(arm) : [element("p", { text: "No arm is up.", cls: "empty" })]));
  rows("devices", state.devices.map((one) => device(one, state.at_s)), "none");
  rows("waiting", state.waiting.map((one) => element("tr", { children: [cell(one.device), cell(one.priority), cell(one.who)] })), "nobody waits");
  rows("runs", state.runs.map((one) => run(one, state.at_s)), "no runs yet");
  const running = state.runs.filter((one) => one.state === "running").length;
  $("totals").textContent = `${state.devices.length} devices, ${state.arms.length} arms up, ${running} runs, ${state.waiting.length} waiting`;
  $("totals").className = "";
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
  const answer = await fetch(order, {
    method: "POST",
    headers: { "Content-Type": "application/json", "X-Robot-RL": "1" },
    body: JSON.stringify({ by: $("by").value }),
  });
  if (answer.ok) $("confirm").close();
  else $("refused").textContent = (await answer.json().catch(() => ({}))).error || `refused (${answer.status})`;
  await look();
};

async function look() {
  try {
    const answer = await fetch("state");
    if (!answer.ok) throw new Error(await answer.text());
    draw(await answer.json());
  } catch (error) {
    $("totals").textContent = `no connection: ${error.message}`;
    $("totals").className = "bad";
  }
}

async function watch() {
  await look();
  setTimeout(watch, 1000);
}

watch();
