// The pool as a map: one cell per block, or per group of neighbours in a large pool.
// Colour is mean utilisation of the held blocks, hatch is shared, a frame is a relocation in flight.

const MAX_CELL = 22, MIN_CELL = 4, MAX_HEIGHT = 420, LEVELS = 8;

export function levelOf(held, live, size) {
  return Math.min(LEVELS - 1, Math.floor((live / (held * size)) * LEVELS));
}

export function layout(numCells, width) {
  let cell = Math.min(MAX_CELL, Math.floor(Math.sqrt((width * MAX_HEIGHT) / Math.max(1, numCells))));
  cell = Math.max(MIN_CELL, cell);
  const columns = Math.max(1, Math.min(numCells, Math.floor(width / cell)));
  return { cell, columns, rows: Math.ceil(numCells / columns) };
}

function palette() {
  const style = getComputedStyle(document.documentElement);
  const colour = (name) => style.getPropertyValue(name).trim();
  return {
    levels: Array.from({ length: LEVELS }, (_, i) => colour(`--u${i}`)),
    edge: colour("--edge"), line: colour("--line"), moving: colour("--moving"),
    pale: colour("--hatch-on-pale"), deep: colour("--hatch-on-deep"),
  };
}

function isDark() {
  return matchMedia("(prefers-color-scheme: dark)").matches;
}

function drawCell(context, colours, x, y, cell, state) {
  const inner = cell - 1; // one pixel between cells
  if (state.level === null) {
    context.strokeStyle = colours.line;
    context.lineWidth = 1;
    context.strokeRect(x + 0.5, y + 0.5, inner - 1, inner - 1);
    context.fillStyle = colours.edge;
    const dot = Math.max(1, Math.round(cell / 5)), at = Math.floor((inner - dot) / 2);
    if (state.cached) context.fillRect(x + at, y + at, dot, dot);
  } else {
    context.fillStyle = colours.levels[state.level];
    context.fillRect(x, y, inner, inner);
    if (cell >= 7) {
      context.strokeStyle = colours.edge;
      context.lineWidth = 1;
      context.strokeRect(x + 0.5, y + 0.5, inner - 1, inner - 1);
    }
  }
  if (state.shared) hatch(context, colours, x, y, inner, state.level);
  if (state.moving) {
    context.strokeStyle = colours.moving;
    context.lineWidth = cell >= 9 ? 2 : 1;
    const half = context.lineWidth / 2;
    context.strokeRect(x + half, y + half, inner - 2 * half, inner - 2 * half);
  }
}

function hatch(context, colours, x, y, inner, level) {
  const pale = isDark() ? level >= LEVELS / 2 : level < LEVELS / 2;
  context.strokeStyle = pale ? colours.pale : colours.deep;
  context.lineWidth = 1;
  context.save();
  context.beginPath();
  context.rect(x, y, inner, inner);
  context.clip();
  context.beginPath();
  for (let offset = -inner; offset < inner; offset += 4) {
    context.moveTo(x + offset, y + inner);
    context.lineTo(x + offset + inner, y);
  }
  context.stroke();
  context.restore();
}

function stateOf(map, i) {
  const held = map.held[i];
  return {
    level: held ? levelOf(held, map.live[i], map.block_size) : null,
    shared: map.shared[i] * 2 > held && held > 0,
    moving: map.moving[i] > 0,
    cached: map.cached[i] > 0,
  };
}

export class BlockMap {
  constructor(canvas, readout, summary) {
    this.canvas = canvas;
    this.readout = readout;
    this.summary = summary;
    this.map = null;
    this.cursor = null;
    this.drawn = null; // what is on the screen, for tests
    canvas.vtokenMap = this;
    new ResizeObserver(() => this.draw()).observe(canvas);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
    canvas.addEventListener("pointermove", (event) => this.point(event));
    canvas.addEventListener("pointerleave", () => this.select(null));
    canvas.addEventListener("keydown", (event) => this.step(event));
  }

  show(map) {
    this.map = map;
    const engine = map.num_engines > 1 ? `Engine ${map.engine}: ` : "";
    const sum = (name) => map[name].reduce((total, value) => total + value, 0);
    const held = sum("held");
    const mean = held ? `, on average ${percent(sum("live") / (held * map.block_size))} full` : "";
    const group = map.blocks_per_cell > 1 ? ` One cell is ${map.blocks_per_cell} neighbouring blocks.` : "";
    this.summary.textContent = engine +
      `${held} of ${map.num_blocks} blocks of ${map.block_size} tokens are held${mean}; ` +
      `${sum("shared")} shared, ${sum("moving")} in relocation, ${sum("cached")} free with cached content.${group}`;
    this.draw();
  }

  draw() {
    if (!this.map || !this.canvas.clientWidth) return;
    const { cell, columns, rows } = layout(this.map.held.length, this.canvas.clientWidth);
    const ratio = devicePixelRatio || 1;
    this.canvas.style.height = `${rows * cell}px`;
    this.canvas.width = Math.round(this.canvas.clientWidth * ratio);
    this.canvas.height = Math.round(rows * cell * ratio);
    const context = this.canvas.getContext("2d");
    context.scale(ratio, ratio);
    const colours = palette();
    for (let i = 0; i < this.map.held.length; i++) {
      const x = (i % columns) * cell, y = Math.floor(i / columns) * cell;
      drawCell(context, colours, x, y, cell, stateOf(this.map, i));
    }
    this.drawn = { map: this.map, cell, columns, ratio };
    if (this.cursor !== null) this.outline(context);
  }

  outline(context) {
    const { cell, columns } = this.drawn;
    context.strokeStyle = getComputedStyle(this.canvas).color;
    context.lineWidth = 2;
    const x = (this.cursor % columns) * cell, y = Math.floor(this.cursor / columns) * cell;
    context.strokeRect(x, y, cell, cell);
  }

  point(event) {
    if (!this.drawn) return;
    const column = Math.floor(event.offsetX / this.drawn.cell);
    const index = Math.floor(event.offsetY / this.drawn.cell) * this.drawn.columns + column;
    const inside = column < this.drawn.columns && index < this.map.held.length;
    this.select(inside ? index : null);
  }

  step(event) {
    if (!this.drawn) return;
    const { columns } = this.drawn, last = this.map.held.length - 1;
    const move = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -columns, ArrowDown: columns, Home: -last, End: last }[event.key];
    if (move === undefined) return;
    event.preventDefault();
    this.select(this.cursor === null ? 0 : Math.max(0, Math.min(last, this.cursor + move)));
  }

  select(index) {
    if (index === this.cursor) return;
    this.cursor = index;
    this.readout.textContent = index === null ? "Point at a block, or focus the map and use the arrow keys." : describe(this.map, index);
    this.draw();
  }
}

export function describe(map, i) {
  const size = map.blocks_per_cell, held = map.held[i];
  const first = 1 + i * size, last = Math.min(first + size - 1, map.num_blocks);
  const name = size === 1 ? `Block ${first}` : `Blocks ${first} to ${last}`;
  const parts = [];
  if (size > 1) parts.push(`${held} held`);
  if (held) parts.push(`${map.live[i]} of ${held * map.block_size} slots live`);
  else parts.push("free");
  if (map.shared[i]) parts.push(size === 1 ? "shared" : `${map.shared[i]} shared`);
  if (map.moving[i]) parts.push(size === 1 ? "in relocation" : `${map.moving[i]} in relocation`);
  if (map.cached[i]) parts.push(size === 1 ? "cached content" : `${map.cached[i]} free with cached content`);
  return `${name}: ${parts.join(", ")}.`;
}

export function drawLegend(list) {
  const entries = [
    ["utilisation, 0 to full", Array.from({ length: LEVELS }, (_, level) => ({ level }))],
    ["shared", [{ level: 1, shared: true }, { level: 6, shared: true }]],
    ["in relocation", [{ level: 2, moving: true }]],
    ["free", [{ level: null }]],
    ["free, content cached", [{ level: null, cached: true }]],
  ];
  list.replaceChildren(...entries.map(([text, states]) => legendEntry(text, states)));
}

function legendEntry(text, states) {
  const cell = 16, ratio = devicePixelRatio || 1;
  const canvas = document.createElement("canvas");
  canvas.setAttribute("aria-hidden", "true");
  canvas.width = states.length * cell * ratio;
  canvas.height = cell * ratio;
  canvas.style.width = `${states.length * cell}px`;
  const context = canvas.getContext("2d");
  context.scale(ratio, ratio);
  states.forEach((state, i) => drawCell(context, palette(), i * cell, 0, cell, state));
  const item = document.createElement("li");
  item.append(canvas, text);
  return item;
}

export function percent(ratio) {
  return `${Math.round(ratio * 100)} %`;
}
