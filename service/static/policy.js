// The policy form: sends only what was changed, and only if the document is still the one shown.

import { ApiError, ask } from "./api.js";
import { difference, showHistory } from "./history.js";

const MAX_PREVIEWED = 20;

const byId = (id) => document.getElementById(id);

export class PolicyForm {
  constructor() {
    this.version = null;
    this.fields = [];
    byId("policy").addEventListener("submit", (event) => {
      event.preventDefault();
      this.send(false);
    });
    byId("policy-preview").addEventListener("click", () => this.send(true));
    byId("policy-reset").addEventListener("click", () => this.load());
  }

  async load() {
    const [policy, { fields }, { policies }] = await Promise.all([ask("admin/policy"), ask("vtoken/ui/fields"), ask("admin/policies")]);
    fields.find((field) => field.name === "policy").choices = policies.map((one) => one.name);
    this.version = policy.version;
    this.fields = fields.filter((field) => field.name in policy.document).map((field) => makeField(field, policy.document[field.name]));
    byId("policy-fields").replaceChildren(...this.fields.map((field) => field.node));
    byId("policy-version").textContent = `(version ${policy.version})`;
    byId("policy-effect").hidden = true;
    this.say("");
    await showHistory(byId("policy-history"));
  }

  // Somebody else changed the policy: load it, unless that would lose what is being edited.
  async seen(version) {
    if (this.version === null || version === undefined || version === this.version) return;
    if (this.fields.some((field) => field.isChanged())) {
      this.say(`The policy is at version ${version} now. “Discard changes” loads it.`, true);
    } else {
      await this.load();
    }
  }

  async send(dryRun) {
    let changes;
    this.fields.forEach((field) => field.complain(""));
    try {
      changes = Object.fromEntries(this.fields.filter((field) => field.isChanged()).map((field) => [field.name, field.value()]));
    } catch (error) {
      this.show(error);
      return;
    }
    if (!Object.keys(changes).length) {
      this.say("Nothing is changed.");
      return;
    }
    this.busy(true);
    try {
      const path = `admin/policy${dryRun ? "?dry_run=true" : ""}`;
      const reply = await ask(path, { method: "PATCH", body: changes, headers: { "If-Match": `"${this.version}"`, "Content-Type": "application/merge-patch+json" } });
      if (dryRun) this.showEffect(reply);
      else await this.applied(reply);
    } catch (error) {
      this.show(error);
    } finally {
      this.busy(false);
    }
  }

  async applied(reply) {
    await this.load();
    const warnings = (reply.warnings ?? []).map((warning) => warning.message ?? warning);
    this.say([`Version ${reply.version} is in force.`, ...warnings].join(" "));
  }

  showEffect(reply) {
    byId("policy-effect").textContent = effect(reply).join("\n");
    byId("policy-effect").hidden = false;
    this.say("Nothing was changed. This is what would happen:");
  }

  show(error) {
    if (!(error instanceof ApiError)) throw error;
    const field = this.fields.find((one) => one.name === error.field);
    if (field) field.complain(error.message);
    if (error.status === 412) this.say(`Not applied: ${error.message}. “Discard changes” loads the present one.`, true);
    else this.say(field ? "Not applied: see the field." : `Not applied: ${error.message}`, true);
  }

  say(text, isError = false) {
    byId("policy-message").textContent = text;
    byId("policy-message").className = isError ? "error" : "";
  }

  busy(isBusy) {
    for (const button of byId("policy").querySelectorAll("button")) button.disabled = isBusy;
  }
}

// The answer of a dry run as lines of text.
function effect({ changes, warnings, requests, totals }) {
  const blocks = totals.freed_blocks === null ? "an unknown number of" : totals.freed_blocks;
  const shown = requests.slice(0, MAX_PREVIEWED), left = requests.length - shown.length;
  return [
    ...Object.entries(changes).map(difference),
    ...warnings.map((warning) => `Warning: ${warning}`),
    `${requests.length} running requests would lose ${totals.evicted_tokens} tokens at once, which frees ${blocks} blocks before repacking:`,
    ...shown.map((one) => {
      const packed = one.freed_blocks_repacked === null ? "" : `, at most ${one.freed_blocks_repacked} blocks once repacked`;
      return `  ${one.request_id}: ${one.policy}, ${one.evicted_tokens} of ${one.live_tokens} tokens ${one.next_eviction}${packed}`;
    }),
    ...(left > 0 ? [`  and ${left} more`] : []),
  ];
}

function makeField({ name, kind, choices, help }, value) {
  const id = `field-${name}`, node = document.createElement("div");
  node.className = "field";
  const label = document.createElement("label");
  label.htmlFor = id;
  label.textContent = name;
  const input = makeInput(kind, choices, value);
  input.id = id;
  input.setAttribute("aria-describedby", `${id}-help ${id}-error`);
  const small = document.createElement("small");
  small.id = `${id}-help`;
  small.textContent = help;
  const error = document.createElement("span");
  error.id = `${id}-error`;
  error.className = "error";
  node.append(label, input, small, error);
  const read = () => (kind === "boolean" ? input.checked : input.value.trim());
  const shown = read();
  input.addEventListener("input", () => node.classList.toggle("changed", read() !== shown));
  return {
    name,
    node,
    isChanged: () => read() !== shown,
    value: () => parse(name, kind, read()),
    complain: (text) => {
      error.textContent = text;
      input.toggleAttribute("aria-invalid", Boolean(text));
    },
  };
}

function makeInput(kind, choices, value) {
  if (choices.length) {
    const select = document.createElement("select");
    select.append(...choices.map((choice) => new Option(choice, choice, false, choice === value)));
    return select;
  }
  const input = document.createElement("input");
  if (kind === "boolean") {
    input.type = "checkbox";
    input.checked = value;
  } else {
    input.type = "text";
    input.inputMode = kind === "integer" ? "numeric" : kind === "number" ? "decimal" : "text";
    input.spellcheck = false;
    input.value = value === null ? "" : kind === "object" ? JSON.stringify(value) : String(value);
  }
  return input;
}

// Text to what JSON has for it; the server checks bounds.
function parse(name, kind, text) {
  if (kind === "boolean") return text;
  if (text === "") return null;
  if (kind === "integer" || kind === "number") {
    const number = Number(text);
    if (!Number.isFinite(number)) throw new ApiError(`${name} must be a number`, { field: name });
    return number;
  }
  if (kind !== "object") return text;
  try {
    return JSON.parse(text);
  } catch {
    throw new ApiError(`${name} must be a JSON object`, { field: name });
  }
}
