// Who changed the policy, when, and what.

import { ask } from "./api.js";

const MAX_ROWS = 20;

export async function showHistory(place) {
  let history;
  try {
    ({ history } = await ask("admin/policy/history"));
  } catch (error) {
    if (error.status !== 404) throw error;
    place.hidden = true; // a server without it
    return;
  }
  place.hidden = false;
  place.querySelector("tbody").replaceChildren(...history.slice(0, MAX_ROWS).map(row));
}

function row({ version, at, by, action, apply_to: applyTo, note, changes, rolled_back_to: target }) {
  const line = document.createElement("tr");
  const what = Object.entries(changes).map(difference);
  const remarks = [
    action === "rollback" ? `back to version ${target}` : action === "patch" ? "" : action,
    applyTo === "new" ? "new requests only" : "",
    note ?? "",
  ].filter(Boolean);
  const when = new Date(at);
  const cells = [[version, "n"], [when.toLocaleString(), ""], [by, ""], [[...what, ...remarks].join("; "), "wrap"]];
  for (const [content, kind] of cells) {
    const cell = document.createElement("td");
    cell.className = kind;
    cell.textContent = content;
    line.append(cell);
  }
  return line;
}

export function difference([name, { from, to }]) {
  return `${name}: ${text(from)} → ${text(to)}`;
}

function text(value) {
  return value !== null && typeof value === "object" ? JSON.stringify(value) : String(value);
}
