// The table of running requests, those that hold most first.

const MAX_ROWS = 50, BAR_WIDTH = 180, BAR_HEIGHT = 10;
const COLUMNS = [
  ["request_id", ""], ["status", ""], ["policy", ""], ["num_tokens", "n"], ["live_tokens", "n"],
  ["evicted_tokens", "n"], ["retained_blocks", "n"], ["ideal_blocks", "n"],
];

export function showRequests(table, note, requests) {
  const sorted = [...requests].sort((a, b) => b.retained_blocks - a.retained_blocks || (a.request_id < b.request_id ? -1 : 1));
  const most = sorted.length ? sorted[0].retained_blocks : 0;
  const rows = sorted.slice(0, MAX_ROWS).map((request) => row(request, most));
  table.tBodies[0].replaceChildren(...rows);
  const left = sorted.length - rows.length;
  note.textContent = !sorted.length ? "No request is running." : left ? `${left} more hold less.` : "";
}

function row(request, most) {
  const line = document.createElement("tr");
  for (const [name, kind] of COLUMNS) {
    const cell = document.createElement("td");
    cell.className = kind;
    cell.textContent = name === "request_id" ? shortened(request[name]) : request[name];
    if (name === "request_id") cell.title = request[name];
    line.append(cell);
  }
  const cell = document.createElement("td");
  cell.append(bar(request, most));
  line.append(cell);
  return line;
}

function shortened(id) {
  return id.length > 28 ? `${id.slice(0, 20)}…${id.slice(-7)}` : id;
}

function bar({ retained_blocks: retained, ideal_blocks: ideal }, most) {
  const scale = most ? BAR_WIDTH / most : 0, filled = Math.min(ideal, retained);
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  svg.setAttribute("width", BAR_WIDTH);
  svg.setAttribute("height", BAR_HEIGHT);
  svg.setAttribute("aria-hidden", "true"); // the numbers stand beside it
  svg.append(rect("ideal", 0, filled * scale), rect("excess", filled * scale, (retained - filled) * scale));
  return svg;
}

function rect(name, x, width) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", "rect");
  node.setAttribute("class", name);
  node.setAttribute("x", x);
  node.setAttribute("width", Math.max(0, width));
  node.setAttribute("height", BAR_HEIGHT);
  return node;
}
