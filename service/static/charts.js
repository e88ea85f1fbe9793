// Two lines over the last minutes. A line is broken where readings are missing.

const WIDTH = 520, HEIGHT = 170, LEFT = 44, RIGHT = 64, TOP = 12, BOTTOM = 22;
export const SPAN_SECONDS = 600;

export class Samples {
  constructor() {
    this.list = [];
  }

  add(sample) {
    this.list.push(sample);
    while (this.list.length && this.list[0].time < sample.time - SPAN_SECONDS) this.list.shift();
  }

  // Readings missing: the next point starts a new line.
  gap() {
    const last = this.list[this.list.length - 1];
    if (last) last.endsLine = true;
  }
}

function element(name, attributes = {}, text = "") {
  const node = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text) node.textContent = text;
  return node;
}

// Runs of points [[x, y], …], each to be drawn as one line.
export function runs(samples, name) {
  const found = [];
  let run = [];
  for (const sample of samples) {
    run.push([sample.time, sample[name]]);
    if (sample.endsLine) {
      found.push(run);
      run = [];
    }
  }
  if (run.length) found.push(run);
  return found;
}

export function niceMax(value) {
  const power = 10 ** Math.floor(Math.log10(Math.max(1, value)));
  return [1, 2, 5, 10].map((step) => step * power).find((limit) => limit >= value);
}

export class LineChart {
  // lines: [{name, label, mark: "first" | "second"}]; max: of the axis, or null: from the data.
  constructor(parent, { lines, max, format, title }) {
    Object.assign(this, { parent, lines, max, format, title });
  }

  draw(samples, now) {
    const values = samples.flatMap((sample) => this.lines.map((line) => sample[line.name]));
    const max = this.max ?? niceMax(Math.max(1, ...values));
    const x = (time) => LEFT + (1 - (now - time) / SPAN_SECONDS) * (WIDTH - LEFT - RIGHT);
    const y = (value) => TOP + (1 - value / max) * (HEIGHT - TOP - BOTTOM);
    const svg = element("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": this.words(samples) });
    this.axes(svg, max, y);
    for (const line of this.lines) {
      for (const run of runs(samples, line.name)) svg.append(mark(run, line.mark, x, y));
    }
    this.labels(svg, samples, y);
    this.parent.replaceChildren(svg);
  }

  axes(svg, max, y) {
    for (const value of [0, max / 2, max]) {
      svg.append(element("line", { class: "grid", x1: LEFT, x2: WIDTH - RIGHT, y1: y(value), y2: y(value) }));
      svg.append(element("text", { x: LEFT - 6, y: y(value) + 4, "text-anchor": "end" }, this.format(value)));
    }
    const minutes = SPAN_SECONDS / 60;
    [[0, `−${minutes} min`], [0.5, `−${minutes / 2} min`], [1, "now"]].forEach(([part, text]) => {
      const at = LEFT + part * (WIDTH - LEFT - RIGHT);
      svg.append(element("text", { x: at, y: HEIGHT - 4, "text-anchor": "middle" }, text));
    });
  }

  // The last values, at the ends of their lines and not on top of each other.
  labels(svg, samples, y) {
    const last = samples[samples.length - 1];
    if (!last) return;
    const places = this.lines.map((line) => ({ line, at: y(last[line.name]) + 4 }));
    places.sort((a, b) => a.at - b.at);
    const room = HEIGHT - BOTTOM;
    for (let i = 1; i < places.length; i++) places[i].at = Math.max(places[i].at, places[i - 1].at + 14);
    for (let i = places.length - 1; i >= 0; i--) places[i].at = Math.min(places[i].at, room - 14 * (places.length - 1 - i));
    for (const { line, at } of places) {
      const text = `${line.label} ${this.format(last[line.name])}`;
      svg.append(element("text", { class: line.mark, x: WIDTH - RIGHT + 6, y: at }, text));
    }
  }

  words(samples) {
    const last = samples[samples.length - 1];
    if (!last) return `${this.title}: no reading yet`;
    const now = this.lines.map((line) => {
      const values = samples.map((sample) => sample[line.name]);
      return `${line.label} now ${this.format(last[line.name])}, between ${this.format(Math.min(...values))} and ${this.format(Math.max(...values))}`;
    });
    return `${this.title}: ${now.join("; ")}`;
  }
}

function mark(run, name, x, y) {
  if (run.length === 1) return element("circle", { class: `dot ${name}`, cx: x(run[0][0]), cy: y(run[0][1]), r: 2 });
  const points = run.map(([time, value]) => `${x(time).toFixed(1)},${y(value).toFixed(1)}`);
  return element("polyline", { class: `line ${name}`, points: points.join(" ") });
}
