"use strict";
// Small drawing tools. Whatever comes from the run becomes a text node or a number, never markup.

const SVG = "http://www.w3.org/2000/svg";

function fill(node, attributes, children) {
  for (const [key, value] of Object.entries(attributes || {})) {
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) node.setAttribute(key, value);
  }
  for (const child of children.flat()) if (child !== null && child !== undefined) node.append(child);
  return node;
}
const h = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);
const s = (tag, attributes, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);
const color = (name) => `var(--${name})`;
const swatch = (name, text) => h("span", {}, h("span", { class: "swatch", style: `background:${color(name)}` }), text);

function short(x) {
  const size = Math.abs(x);
  if (size >= 10000) return `${(x / 1000).toFixed(size >= 100000 ? 0 : 1)}k`;
  if (Number.isInteger(x) || size >= 100) return x.toFixed(0);
  if (size >= 1) return x.toFixed(2);
  return size >= 0.001 || size === 0 ? x.toFixed(3) : x.toExponential(1);
}

// Three to six round numbers that span low..high.
function ticks(low, high) {
  const step = 10 ** Math.floor(Math.log10((high - low) / 3));
  const size = [1, 2, 5, 10].map((m) => m * step).find((m) => (high - low) / m <= 5);
  const found = [];
  for (let t = Math.ceil(low / size - 1e-9); t * size <= high + 1e-9 * size; t++) found.push(t * size);
  return found;
}

// Centred moving average; null where there are too few points for one to help.
function smooth(points) {
  if (points.length < 12) return null;
  const reach = Math.ceil(points.length / 20);
  return points.map(([x], i) => {
    const near = points.slice(Math.max(0, i - reach), i + reach + 1);
    return [x, near.reduce((sum, p) => sum + p[1], 0) / near.length];
  });
}

// A line chart. `marks` are points with intervals: {x, value, low, high, color, hollow}.
function chart({ title, why, points, marks = [], range = null, width = 270, height = 130, stroke = "accent" }) {
  const left = 40, right = 10, top = 8, bottom = 20;
  const xs = [...points.map((p) => p[0]), ...marks.map((m) => m.x)];
  const ys = [...points.map((p) => p[1]), ...marks.flatMap((m) => [m.low, m.high])];
  const [x0, x1] = [Math.min(...xs), Math.max(...xs)];
  let [y0, y1] = range || [Math.min(...ys), Math.max(...ys)];
  if (y0 === 0 && y1 === 0) y1 = 1;
  if (y0 === y1) [y0, y1] = [y0 - (Math.abs(y0) || 1) / 2, y1 + (Math.abs(y1) || 1) / 2];
  if (!range && y0 > 0 && y0 < y1 / 2) y0 = 0;
  const X = (x) => left + ((x - x0) / (x1 - x0 || 1)) * (width - left - right);
  const Y = (y) => height - bottom - ((y - y0) / (y1 - y0)) * (height - top - bottom);
  const path = (rows) => rows.map(([x, y], i) => `${i ? "L" : "M"}${X(x).toFixed(1)} ${Y(y).toFixed(1)}`).join("");
  const svg = s("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": title });
  for (const t of ticks(y0, y1)) {
    svg.append(s("line", { x1: left, x2: width - right, y1: Y(t), y2: Y(t), stroke: color("line") }));
    svg.append(s("text", { x: left - 6, y: Y(t) + 4, "text-anchor": "end" }, short(t)));
  }
  for (const t of ticks(x0, x1 || 1).filter(Number.isInteger)) {
    svg.append(s("text", { x: X(t), y: height - 4, "text-anchor": "middle" }, String(t)));
  }
  const line = { fill: "none", stroke: color(stroke), "stroke-width": 2, "stroke-linejoin": "round" };
  const even = smooth(points);
  svg.append(s("path", { ...line, d: path(points), "stroke-opacity": even ? 0.3 : 1, "stroke-width": even ? 1.2 : 2 }));
  if (even) svg.append(s("path", { ...line, d: path(even) }));
  for (const m of marks) {
    const x = X(m.x) + (m.hollow ? 5 : -5); // side by side
    svg.append(s("line", { x1: x, x2: x, y1: Y(m.low), y2: Y(m.high), stroke: color(m.color), "stroke-width": 2 }));
    svg.append(s("circle", { cx: x, cy: Y(m.value), r: 5, fill: m.hollow ? color("card") : color(m.color), stroke: color(m.color), "stroke-width": 2 }));
  }
  const cursor = s("circle", { r: 3.5, fill: color(stroke), visibility: "hidden" });
  svg.append(cursor);
  const last = points[points.length - 1];
  const say = (p) => (p ? `${short(p[1])} at ${p[0]}` : "");
  const readout = h("span", { class: "readout" }, say(last));
  svg.addEventListener("mousemove", (event) => {
    const box = svg.getBoundingClientRect();
    const x = ((event.clientX - box.left) / box.width) * width;
    const near = points.reduce((a, b) => (Math.abs(X(b[0]) - x) < Math.abs(X(a[0]) - x) ? b : a), last);
    fill(cursor, { cx: X(near[0]), cy: Y(near[1]), visibility: "visible" }, []);
    readout.textContent = say(near);
  });
  svg.addEventListener("mouseleave", () => {
    cursor.setAttribute("visibility", "hidden");
    readout.textContent = say(last);
  });
  return h("div", { class: "chart" }, h("h3", {}, title, readout), why === undefined ? null : h("div", { class: "why" }, why), svg);
}

// Estimates with their intervals on one line from 0 to 1.
function intervals(estimates, colors) {
  const width = 300, X = (v) => 8 + v * (width - 16);
  const svg = s("svg", { viewBox: `0 0 ${width} ${estimates.length * 16 + 20}` });
  const base = estimates.length * 16 + 6;
  for (const t of [0, 0.25, 0.5, 0.75, 1]) {
    svg.append(s("line", { x1: X(t), x2: X(t), y1: 0, y2: base - 2, stroke: color("line") }));
    svg.append(s("text", { x: X(t), y: base + 10, "text-anchor": "middle" }, String(t)));
  }
  estimates.forEach((e, i) => {
    const y = i * 16 + 8;
    svg.append(s("line", { x1: X(e.low), x2: X(e.high), y1: y, y2: y, stroke: color(colors[i]), "stroke-width": 5, "stroke-opacity": 0.4, "stroke-linecap": "round" }));
    svg.append(s("circle", { cx: X(e.value), cy: y, r: 5, fill: color(colors[i]) }));
  });
  return svg;
}

// One row per kind: a dot before, a dot after, and the way between.
function dumbbells(rows) {
  const width = 900, left = 110, right = 60, X = (v) => left + v * (width - left - right);
  const svg = s("svg", { viewBox: `0 0 ${width} ${rows.length * 22 + 24}` });
  const base = rows.length * 22;
  for (const t of [0, 0.25, 0.5, 0.75, 1]) {
    svg.append(s("line", { x1: X(t), x2: X(t), y1: 0, y2: base, stroke: color("line") }));
    svg.append(s("text", { x: X(t), y: base + 14, "text-anchor": "middle" }, String(t)));
  }
  rows.forEach(({ name, before, after }, i) => {
    const y = i * 22 + 11;
    svg.append(s("text", { x: left - 14, y: y + 4, "text-anchor": "end", style: `fill:${color("ink")};font-size:13px` }, name));
    svg.append(s("line", { x1: X(before), x2: X(after), y1: y, y2: y, stroke: color("after"), "stroke-width": 3, "stroke-opacity": 0.4 }));
    svg.append(s("circle", { cx: X(before), cy: y, r: 5.5, fill: color("before") }));
    svg.append(s("circle", { cx: X(after), cy: y, r: 5.5, fill: color("after") }));
    svg.append(s("text", { x: width - right + 14, y: y + 4 }, `${after >= before ? "+" : "−"}${Math.abs(after - before).toFixed(2)}`));
  });
  return svg;
}
