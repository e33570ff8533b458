// Draws the page from the events of /stream. Texts from the job are inserted as text only, never as HTML.
"use strict";

const KEPT = 900; // points: 15 minutes
const STATES = {
  starting: ["◌", "starting"], init: ["◔", "in init()"], running: ["●", "running"], waiting: ["◐", "waiting"],
  late: ["◆", "late"], slow: ["▲", "slow"], silent: ["?", "silent"], left: ["○", "has left"], ended: ["■", "ended"],
  stopped: ["▪", "was ended"], failed: ["✕", "failed"],
};
const KINDS = { info: "·", warning: "▲", error: "✕" };
const DASHES = ["solid", "dash", "dot", "dashdot", "longdash", "longdashdot"];
const NAMES = 4; // operations that are shown of those that wait for the same ranks
const UNKNOWN = "–";
let points = [];
let now = null;
let drawnAt = 0;

const byId = (id) => document.getElementById(id);

// --- text

function digits(value) {
  return value >= 100 ? value.toFixed(0) : value >= 10 ? value.toFixed(1) : value.toFixed(2);
}

function size(bytes) {
  if (!bytes) return "0 B";
  const step = Math.min(4, Math.floor(Math.log2(bytes) / 10));
  return step < 1 ? `${Math.round(bytes)} B` : `${digits(bytes / 2 ** (10 * step))} ${["B", "KiB", "MiB", "GiB", "TiB"][step]}`;
}

function duration(seconds) {
  if (seconds === null || seconds === undefined) return UNKNOWN;
  return seconds >= 1 ? `${digits(seconds)} s` : `${digits(seconds * 1e3)} ms`;
}

function span(seconds) {
  const whole = Math.max(0, Math.floor(seconds));
  const pad = (value) => String(value).padStart(2, "0");
  return `${Math.floor(whole / 3600)}:${pad(Math.floor(whole / 60) % 60)}:${pad(whole % 60)}`;
}

const percent = (share) => (share === null || share === undefined ? UNKNOWN : `${Math.round(share * 100)} %`);
const clock = (seconds) => new Date(seconds * 1000).toLocaleTimeString([], { hour12: false });
const plural = (count, word) => `${count} ${word}${count === 1 ? "" : "s"}`;
const ranksText = (text) => (/^\d+$/.test(text) ? `rank ${text}` : `ranks ${text}`);

// --- elements

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children); // a string becomes a text node
  return made;
}

function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

function split(text) {
  const [number, ...unit] = text.split(" ");
  return unit.length ? [number, element("small", {}, ` ${unit.join(" ")}`)] : [number];
}

// --- parts of the page

function drawHead() {
  setText(byId("title"), now.title);
  byId("title").title = now.title;
  document.title = `${now.over ? "■ " : now.waits.length ? "◆ " : ""}${now.title} · ddl`;
  const ran = `${now.over ? "ran" : "running for"} ${span(now.at - now.begun)}`;
  setText(byId("about"), `${plural(now.size, "rank")} on ${plural(now.hosts, "host")} · since ${clock(now.begun)} · ${ran}`);
  setText(byId("foot"), `ddl ${now.version} · the last 15 minutes · last update ${clock(now.at)}`);
}

function drawStatus(text, kind) {
  const pill = byId("status");
  setText(pill, text);
  pill.className = `pill ${kind}`;
}

function drawTiles() {
  const all = now.summary;
  const tiles = [
    ["Speed", all.steps_per_s === null ? UNKNOWN : `${digits(all.steps_per_s)} steps/s`, `${all.steps.toLocaleString("en")} steps so far`],
    ["A step takes", duration(all.step_s), "median of the ranks"],
    ["Communication", percent(all.exposed), "of a step, exposed"],
    ["Input", percent(all.input), "of a step, waiting"],
    ["Tensors reduced", `${size(all.bytes_per_s)}/s`, "all ranks together"],
    ["Memory", size(all.memory_most), "of the largest rank"],
    ["Ranks", `${all.running} of ${now.size}`, "are running"],
  ];
  if (now.world) {
    const world = now.world;
    const more = `${plural(world.size, "rank")}; lost: ${world.ranks_lost}, joined: ${world.ranks_joined}; stood still for ${duration(world.seconds_lost)}`;
    tiles.push(["World", String(world.generation), more]);
  }
  byId("tiles").replaceChildren(
    ...tiles.map(([name, value, more]) =>
      element("div", { class: "tile" }, element("dl", {}, element("dt", {}, name), element("dd", {}, ...split(value))), element("p", { class: "more" }, more)),
    ),
  );
}

function drawWaits() {
  const section = byId("waits");
  section.hidden = !now.waits.length;
  if (section.hidden) return;
  const first = now.waits[0];
  const who = first.missing === "" ? "The transport or the network" : ranksText(first.missing);
  const title = `◆ ${who[0].toUpperCase()}${who.slice(1)} ${/^ranks/.test(who) ? "keep" : "keeps"} others waiting for ${first.waits_s.toFixed(0)} s`;
  const rows = now.waits.map((wait) => {
    const names = wait.names.slice(0, NAMES).map((name) => name || "(a call without a name)").join(", ");
    const rest = wait.more + Math.max(0, wait.names.length - NAMES);
    const more = rest ? ` and ${rest} more` : "";
    return element("tr", {},
      element("td", { class: "names" }, names + more),
      element("td", { "data-label": "submitted on" }, wait.ready),
      element("td", { "data-label": "missing on" }, wait.missing || "none: all have entered it"),
      element("td", { "data-label": "waits" }, `${wait.waits_s.toFixed(1)} s`));
  });
  const heads = ["operation", "submitted on", "missing on", "waits"].map((text) => element("th", { scope: "col" }, text));
  section.replaceChildren(element("h2", {}, title), element("table", {}, element("thead", {}, element("tr", {}, ...heads)), element("tbody", {}, ...rows)));
}

function bar(rank) {
  if (rank.compute === null) return [];
  const parts = [["compute", rank.compute], ["exposed", rank.exposed], ["input", rank.input || 0]];
  const spans = parts.map(([name, share]) => {
    const part = element("span", { class: name });
    part.style.width = `${share * 100}%`;
    return part;
  });
  const words = `computation ${percent(rank.compute)}, exposed communication ${percent(rank.exposed)}, input ${percent(rank.input)}`;
  const short = [rank.compute, rank.exposed, rank.input].map(percent).join(" · ");
  return [element("div", { class: "bar", role: "img", "aria-label": words, title: words }, ...spans), element("div", { class: "bar-text", "aria-hidden": "true" }, short)];
}

function rankRow(rank) {
  const [symbol, word] = STATES[rank.state] || ["?", rank.state];
  const cell = (label, text, kind = "") => element("td", { "data-label": label, class: kind }, text === UNKNOWN ? "" : text);
  const gpu = rank.gpu_memory ? `${percent(rank.gpu)} · ${size(rank.gpu_memory[0])}` : "";
  const state = element("td", { class: "state" }, element("i", { "aria-hidden": "true" }, symbol), ` ${word}`);
  if (rank.doing) state.title = rank.doing;
  const remark = [rank.remark, ["late", "waiting", "silent"].includes(rank.state) ? rank.doing : ""].filter(Boolean).join("; ");
  return element("tr", { class: `is-${rank.state}`, "data-rank": rank.rank },
    cell("rank", String(rank.rank), "number"), state,
    cell("steps", rank.steps ? rank.steps.toLocaleString("en") : ""), cell("step", duration(rank.step_s)),
    element("td", { class: "time" }, ...bar(rank)),
    cell("CPU cores", rank.cpu === null ? "" : digits(rank.cpu)), cell("memory", rank.memory ? size(rank.memory) : ""),
    cell("GPU", gpu, "of-gpu"), element("td", { class: "remark" }, remark));
}

function drawRanks() {
  const table = byId("ranks");
  const hosts = new Map();
  for (const rank of now.ranks) hosts.set(rank.host, [...(hosts.get(rank.host) || []), rank]);
  const bodies = [...hosts].map(([host, ranks]) => {
    const head = element("th", { colspan: 9, scope: "rowgroup" }, host, element("small", {}, ` · ${plural(ranks.length, "rank")}`));
    return element("tbody", {}, element("tr", { class: "host" }, head), ...ranks.map(rankRow));
  });
  for (const body of [...table.tBodies]) body.remove();
  table.append(...bodies);
  table.classList.toggle("has-gpu", now.ranks.some((rank) => rank.gpu_memory));
  const more = byId("ranks-more");
  more.hidden = now.ranks.length === now.size;
  setText(more, `${now.ranks.length} of ${now.size} ranks are listed, those that differ from the others among them.`);
}

function drawLinks() {
  const rows = now.links.map((link) => {
    const tensors = link.kind === "tensors";
    const rate = tensors ? `${size(link.sent_per_s)}/s` : `↑ ${size(link.sent_per_s)}/s · ↓ ${size(link.received_per_s)}/s`;
    const total = tensors ? size(link.sent_bytes) : `↑ ${size(link.sent_bytes)} · ↓ ${size(link.received_bytes)}`;
    const speed = link.bits_per_s ? ` of ${digits(link.bits_per_s / 1e9)} Gbit/s` : "";
    return element("tr", {},
      element("td", { class: "name" }, `${link.host} · ${link.name}`), element("td", {}, tensors ? "tensors" : "interface"),
      element("td", { "data-label": "now" }, rate), element("td", { "data-label": "in use" }, link.busy === null ? "" : percent(link.busy) + speed),
      element("td", { "data-label": "in total" }, total));
  });
  byId("links").tBodies[0].replaceChildren(...rows);
}

let eventsDrawn = "";
function drawEvents() {
  const key = JSON.stringify(now.events);
  if (key === eventsDrawn) return; // so that a selection in the list stays
  eventsDrawn = key;
  byId("events-none").hidden = now.events.length > 0;
  byId("events").replaceChildren(
    ...[...now.events].reverse().map((one) =>
      element("li", { class: one.kind },
        element("time", {}, clock(one.at)), element("i", { "aria-label": one.kind }, KINDS[one.kind] || "·"),
        element("pre", one.text.includes("\n") ? { class: "table", tabindex: "0" } : {}, one.text)),
    ),
  );
}

// --- charts

// The library of the charts reads a little HTML in names: <b>, <a>. Entities switch that off.
const literal = (text) => text.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");

// A legend must not be wider than a phone: of a long name its beginning and end are shown.
const shortened = (text) => (text.length > 34 ? `${text.slice(0, 18)}…${text.slice(-15)}` : text);

function unitOf(values) {
  const most = Math.max(0, ...values.filter((value) => value !== null && value !== undefined));
  const step = most ? Math.min(3, Math.floor(Math.log2(most) / 10)) : 2;
  return [2 ** (10 * step), ["B", "KiB", "MiB", "GiB"][step]];
}

function localTimes() {
  const shift_s = new Date().getTimezoneOffset() * 60; // the library shows numbers as UTC
  return points.map((point) => (point.t - shift_s) * 1000);
}

function plot(id, traces, more = {}) {
  const style = getComputedStyle(document.documentElement);
  const colour = (name) => style.getPropertyValue(`--${name}`).trim();
  const times = localTimes();
  const from = times[0];
  const last = Math.max(times[times.length - 1], from + 60000); // a job that has just begun fills the chart bit by bit
  const axis = { fixedrange: true, gridcolor: colour("grid"), linecolor: colour("line"), zeroline: false, automargin: true };
  const layout = {
    margin: { l: 44, r: 12, t: 8, b: 26 }, paper_bgcolor: "transparent", plot_bgcolor: "transparent", autosize: true,
    font: { family: getComputedStyle(document.body).fontFamily, size: 12, color: colour("soft") },
    xaxis: { ...axis, type: "date", range: [from, last], tickformat: last - from > 120000 ? "%H:%M" : "%H:%M:%S", nticks: 6, showgrid: false },
    yaxis: { ...axis, rangemode: "tozero", nticks: 5 }, hovermode: "x unified", dragmode: false,
    hoverlabel: { bgcolor: colour("card"), bordercolor: colour("line"), font: { color: colour("text") } },
    showlegend: traces.length > 1, legend: { orientation: "h", x: 0, y: 1, yanchor: "bottom", traceorder: "normal", itemclick: false, itemdoubleclick: false },
    ...more,
  };
  if (traces.length > 1) layout.margin.t = 30;
  const drawn = traces.map((trace, at) => {
    const own = colour(trace.colour);
    const line = { color: own, width: 2, dash: trace.dash || "solid", shape: "linear" };
    const fill = trace.stack ? { stackgroup: "parts", line: { ...line, width: 1 }, fillcolor: own, fillpattern: { shape: trace.pattern, fgcolor: colour("card"), bgcolor: own, size: 7, solidity: 0.25, fillmode: "overlay" } } : { line };
    return { type: "scatter", mode: "lines", x: times, y: trace.y, name: literal(shortened(trace.name)), hovertemplate: `%{y:.3~r}${trace.unit || ""}`, connectgaps: false, ...fill };
  });
  Plotly.react(byId(id), drawn, layout, { displayModeBar: false, responsive: true, scrollZoom: false, doubleClick: false });
}

function drawCharts() {
  if (!points.length || !window.Plotly) return;
  const column = (name, by = 1) => points.map((point) => (point[name] === null || point[name] === undefined ? null : point[name] / by));
  plot("chart-rate", [{ name: "steps/s", colour: "compute", y: column("rate") }]);
  plot("chart-parts", [
    { name: "computation", colour: "compute", y: column("compute"), stack: true, pattern: "", unit: " ms" },
    { name: "exposed communication", colour: "exposed", y: column("exposed"), stack: true, pattern: "/", unit: " ms" },
    { name: "waiting for input", colour: "input", y: column("input"), stack: true, pattern: ".", unit: " ms" },
  ]);
  const links = [...new Set(points.flatMap((point) => Object.keys(point.links)))];
  const [byRate, rateUnit] = unitOf(points.flatMap((point) => Object.values(point.links)));
  setText(byId("unit-links"), `${rateUnit}/s; of interfaces, what they send`);
  const colours = ["compute", "exposed", "input", "other"];
  plot("chart-links", links.map((name, at) => ({
    name, colour: colours[at % colours.length], dash: DASHES[at % DASHES.length], unit: ` ${rateUnit}/s`,
    y: points.map((point) => (name in point.links ? point.links[name] / byRate : null)),
  })));
  const [bySize, sizeUnit] = unitOf(points.flatMap((point) => [point.most, point.gpu]));
  setText(byId("unit-memory"), sizeUnit);
  const memory = [
    { name: "largest rank", colour: "compute", y: column("most", bySize), unit: ` ${sizeUnit}` },
    { name: "median rank", colour: "exposed", dash: "dash", y: column("median", bySize), unit: ` ${sizeUnit}` },
  ];
  if (points.some((point) => point.gpu)) memory.push({ name: "GPU, largest", colour: "input", dash: "dot", y: column("gpu", bySize), unit: ` ${sizeUnit}` });
  plot("chart-memory", memory);
}

// --- what arrives

function take(data) {
  now = data.now;
  points = [...(data.first ? [] : points), ...data.points].slice(-KEPT);
  drawHead();
  drawTiles();
  drawWaits();
  drawRanks();
  drawLinks();
  drawEvents();
  if (data.points.length && (data.first || performance.now() - drawnAt > 900)) {
    drawnAt = performance.now();
    drawCharts();
  }
  if (now.over) {
    drawCharts();
    const known = now.over.code >= 0;
    drawStatus(`${now.over.code === 0 ? "■" : "✕"} the job has ended${known ? `: exit code ${now.over.code}` : ""}`, now.over.code === 0 ? "" : "bad");
  } else {
    drawStatus("● live", "live");
  }
}

function listen() {
  const source = new EventSource("/stream");
  source.onmessage = (message) => {
    take(JSON.parse(message.data));
    if (now.over) source.close();
  };
  source.onerror = () => {
    if (now && now.over) return;
    drawStatus("✕ no connection to the launcher", "bad");
    if (source.readyState === EventSource.CLOSED) setTimeout(listen, 3000);
  };
}

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawCharts);
listen();
