"use strict";
// Figures drawn again from their data, with the axes of figure.py: at the width that they have on the page, without the
// series that are hidden, on a linear or a logarithmic axis, and with the values under the pointer.
const all = (selector, root = document) => [...root.querySelectorAll(selector)];

function element(name, attributes = {}, text = "") {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.textContent = text;
  return made;
}

function number(x, digits = 3) {
  const size = Math.abs(x);
  const text = x && !(size >= 1e-3 && size < 1e4)
    ? x.toExponential(1).replace(".0e", "e").replace("e+", "e")
    : String(Number(x.toPrecision(digits)));
  return text.replace("-", "−");
}

function steps(low, high, room, whole) {
  const rough = (high - low) / room, power = rough > 0 ? 10 ** Math.floor(Math.log10(rough)) : 1;
  const fine = [1, 2, 5, 10].map(m => m * power).find(step => step >= rough * 0.999), step = whole ? Math.max(fine, 1) : fine;
  const found = [];
  for (let i = Math.ceil(low / step - 1e-9); i <= Math.floor(high / step + 1e-9); i++) found.push(i * step);
  return found;
}

function powers(low, high) {
  const factors = high - low < 1.5 ? [1, 2, 5] : high - low < 2.5 ? [1, 3] : [1];
  const every = Math.max(1, Math.ceil((high - low) / 7)), found = [];
  for (let e = Math.floor(low); e <= Math.ceil(high); e++)
    if (e % every === 0)
      for (const value of factors.map(f => f * 10 ** e))
        if (Math.log10(value) >= low && Math.log10(value) <= high) found.push(value);
  return found.length ? found : [10 ** ((low + high) / 2)];
}

class Plot {
  constructor(figure) {
    this.figure = figure;
    this.svg = figure.querySelector(".plot");
    this.data = JSON.parse(figure.querySelector(".plotted").textContent);
    this.log = this.data.log;
    this.whole = this.svg.dataset.whole.split(" ").map(Number)[3];
    this.readout = figure.appendChild(document.createElement("div"));
    this.readout.className = "readout";
    this.readout.hidden = true;
    this.draw();
  }

  get shown() {
    const training = !document.body.classList.contains("no-training") || !this.figure.closest(".curves");
    return this.data.lines.filter(z => !hidden.has(z.series) && (training || z.style !== "dashed"));
  }

  scale() {
    const { top, ticks, margins: [left, right] } = this.data, lines = this.shown;
    this.wide = Math.max(200, Math.floor(this.svg.getBoundingClientRect().width) || 380);
    const xs = this.data.lines.flatMap(z => z.x);
    [this.start, this.stop] = xs.length ? [Math.min(...xs), Math.max(...xs)] : [0, 1];
    if (ticks) [this.start, this.stop] = [-0.3, Math.max(this.stop, ticks.length - 1) + 0.3];
    this.wholeX = xs.every(Number.isInteger);
    const values = lines.flatMap(z => [...z.y, ...(z.low || []), ...(z.high || [])]).filter(y => y !== null);
    this.floor = 0.6 * Math.min(...values.filter(y => y > 0), 1e300);
    const seen = values.filter(y => this.has(y)).map(y => this.bend(y));
    let [low, high] = seen.length ? [Math.min(...seen), Math.max(...seen)] : [0, 1];
    if (top !== null) [this.low, this.high] = [0, top];
    else {
      if (this.log && high - low < 0.5) [low, high] = [(low + high) / 2 - 0.25, (low + high) / 2 + 0.25];
      const room = 0.04 * (high - low) || 0.5;
      [this.low, this.high] = [!this.log && low >= 0 && low < 0.5 * high ? 0 : low - room, high + room];
    }
    this.across = x => left + (x - this.start) / (this.stop - this.start || 1) * (this.wide - left - right);
  }

  has(y) { return y !== null && (y >= 0 || !this.log); }

  bend(y) { return this.log ? Math.log10(y || this.floor) : y; }

  up(y) {
    const { high, margins: [, , top, bottom] } = this.data;
    return high - bottom - (this.bend(y) - this.low) / (this.high - this.low) * (high - top - bottom);
  }

  draw() {
    this.scale();
    this.svg.setAttribute("viewBox", `0 0 ${this.wide} ${this.data.high}`);
    this.svg.dataset.whole = `0 0 ${this.wide} ${this.whole}`;
    this.svg.querySelector(".paper").setAttribute("width", this.wide);
    this.frame();
    for (const old of all(":scope > [data-series], :scope > .start", this.svg)) old.remove();
    const key = this.svg.querySelector(".key");
    for (const line of this.data.lines) this.svg.insertBefore(this.line(line), key);
  }

  frame() {
    const { high, ticks, across, margins: [left, right, top, bottom] } = this.data;
    const frame = this.svg.querySelector(".frame"), parts = [];
    for (const y of this.log ? powers(this.low, this.high) : steps(this.low, this.high, 6))
      parts.push(element("path", { class: "grid", d: `M${left} ${this.up(y).toFixed(1)}H${this.wide - right}` }),
        element("text", { x: left - 6, y: (this.up(y) + 4).toFixed(1), "text-anchor": "end" }, number(y)));
    const room = this.wide - left - right;
    const every = ticks && Math.ceil(ticks.length * 7 * Math.max(...ticks.map(t => t.length)) / room);
    const columns = ticks
      ? ticks.map((text, i) => [i, text]).filter(([i]) => i % every === 0)
      : steps(this.start, this.stop, Math.min(10, room / 50), this.wholeX).map(x => [x, number(x)]);
    for (const [x, text] of columns)
      parts.push(element("path", { class: "tick", d: `M${this.across(x).toFixed(1)} ${high - bottom}v4` }),
        element("text", { x: this.across(x).toFixed(1), y: high - bottom + 16, "text-anchor": "middle" }, text));
    parts.push(element("path", { class: "axis", d: `M${left} ${top}V${high - bottom}H${this.wide - right}` }),
      element("text", { class: "name", x: left + room / 2, y: high - 4, "text-anchor": "middle" }, across));
    frame.replaceChildren(...parts);
  }

  line(z) {
    const at = ys => z.x.map((x, i) => [x, ys[i]]).filter(([, y]) => this.has(y))
      .map(([x, y]) => [this.across(x).toFixed(1), this.up(y).toFixed(1)]);
    const path = points => points.length ? "M" + points.map(p => p.join(" ")).join("L") : "M0 0";
    const group = element("g", { class: `${z.series < 0 ? "start" : "s" + z.series % this.data.colours} ${z.style}` });
    if (z.series >= 0) group.dataset.series = z.series;
    group.classList.toggle("off", !this.shown.includes(z));
    const points = at(z.y);
    if (z.low && z.high) group.append(element("path", { class: "band", d: path([...at(z.high), ...at(z.low).reverse()]) + "Z" }));
    if (z.style !== "points") group.append(element("path", { class: "line", d: path(points) }));
    const every = Math.max(1, Math.floor(points.length / 7));
    const shift = points.length > 14 ? Math.floor(z.series * every / Math.max(1, this.data.series)) : 0;
    const marked = z.style === "points" ? points : z.style === "solid" ? points.filter((_, i) => i >= shift && (i - shift) % every === 0) : [];
    for (const [x, y] of marked) group.append(element("path", { class: "mark", transform: `translate(${x} ${y})`, d: z.marker }));
    return group;
  }

  // The place among those of the lines in view that is nearest to a point of the page.
  nearest(pageX) {
    const box = this.svg.getBoundingClientRect(), at = (pageX - box.left) * this.wide / box.width;
    const xs = this.shown.flatMap(z => z.x);
    return xs.length ? xs.reduce((a, b) => Math.abs(this.across(b) - at) < Math.abs(this.across(a) - at) ? b : a) : null;
  }

  cross(x) {
    this.svg.querySelector(".cross")?.remove();
    this.readout.hidden = true;
    const found = x === null ? [] : this.shown.map(z => [z, z.y.filter((y, i) => z.x[i] === x && this.has(y))]).filter(([, ys]) => ys.length);
    if (!found.length) return;
    const { high, ticks, margins: [, , top, bottom] } = this.data, at = this.across(x);
    const cross = element("g", { class: "cross" });
    cross.append(element("path", { d: `M${at.toFixed(1)} ${top}V${high - bottom}` }));
    for (const y of found.flatMap(([, ys]) => ys)) cross.append(element("circle", { cx: at.toFixed(1), cy: this.up(y).toFixed(1), r: 2.5 }));
    this.svg.append(cross);
    this.tell(found, `${this.data.across} ${ticks ? ticks[x] : number(x)}`, at);
  }

  // One row a series: its solid line or points, then in soft colour its dashed line.
  tell(found, heading, at) {
    const labels = [...new Set(found.map(([z]) => z.label))];
    const rows = labels.map(label => {
      const row = document.createElement("tr"), own = found.filter(([z]) => z.label === label);
      row.insertCell().textContent = label;
      for (const dashed of [false, true]) {
        const cell = row.insertCell();
        cell.textContent = own.filter(([z]) => (z.style === "dashed") === dashed)
          .flatMap(([, ys]) => ys.map(y => number(y, 4))).join(", ");
        if (dashed) cell.className = "soft";
      }
      return row;
    });
    const title = document.createElement("strong"), table = document.createElement("table");
    title.textContent = heading;
    table.append(...rows);
    this.readout.replaceChildren(title, table);
    this.readout.hidden = false;
    const box = this.svg.getBoundingClientRect(), frame = this.figure.getBoundingClientRect();
    const place = box.left - frame.left + at * box.width / this.wide, own = this.readout.offsetWidth;
    const left = place + 12 + own <= frame.width ? place + 12 : place - 12 - own;
    this.readout.style.left = `${Math.max(2, Math.min(left, frame.width - own - 2))}px`;
    this.readout.style.top = `${box.top - frame.top + 8}px`;
  }
}

const hidden = new Set();  // series
const plots = all("figure").filter(figure => figure.querySelector(".plotted")).map(figure => new Plot(figure));
const redraw = () => plots.forEach(plot => plot.draw());
const shared = plot => JSON.stringify([plot.data.across, plot.data.ticks]);

for (const plot of plots) {
  const alike = plots.filter(other => shared(other) === shared(plot));
  plot.svg.addEventListener("pointermove", event => {
    const x = plot.nearest(event.clientX);
    alike.forEach(other => other.cross(x));
  });
  plot.svg.addEventListener("pointerleave", () => alike.forEach(other => other.cross(null)));
  const axis = plot.figure.querySelector("[data-axis]");
  axis?.addEventListener("click", () => {
    plot.log = !plot.log;
    axis.dataset.axis = plot.log ? "log" : "linear";
    axis.textContent = plot.log ? "linear" : "log";
    plot.draw();
  });
}
let width = innerWidth;
addEventListener("resize", () => { if (innerWidth !== width) { width = innerWidth; redraw(); } });
