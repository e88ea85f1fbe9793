// The page: asks for the pool again and again, draws it, and says when it cannot.

import { ApiError, ask, key } from "./api.js";
import { LineChart, Samples } from "./charts.js";
import { Engines } from "./engines.js";
import { BlockMap, drawLegend, percent } from "./map.js";
import { PolicyForm } from "./policy.js";
import { showRequests } from "./requests.js";

const MIN_INTERVAL_MS = 1000, MAX_RETRY_MS = 15000;
const byId = (id) => document.getElementById(id);

class Page {
  constructor() {
    this.samples = new Samples();
    this.map = new BlockMap(byId("map"), byId("map-readout"), byId("map-summary"));
    this.engines = new Engines(byId("engines"), byId("engines-note"), () => this.isOpen && this.resume());
    this.policy = new PolicyForm();
    this.waste = new LineChart(byId("chart-waste"), {
      title: "Waste ratio", max: 1, format: (value) => value.toFixed(2),
      lines: [{ name: "waste", label: "F", mark: "first" }, { name: "theta", label: "θ", mark: "second" }],
    });
    this.blocks = new LineChart(byId("chart-blocks"), {
      title: "Blocks", max: null, format: (value) => String(Math.round(value)),
      lines: [{ name: "retained", label: "held", mark: "first" }, { name: "ideal", label: "ideal", mark: "second" }],
    });
    this.timer = null;
    this.readAt = null; // of the last reading that came
    this.lost = null; // {since, why} while there is none
    this.failures = 0;
    this.run = 0; // grows with each login: answers to an older one are dropped
    byId("login").addEventListener("submit", (event) => this.login(event));
    byId("lock").addEventListener("click", () => {
      key.forget();
      location.reload();
    });
    document.addEventListener("visibilitychange", () => this.visibility());
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => drawLegend(byId("legend")));
    setInterval(() => this.tick(), 1000);
    if (key.get()) this.start();
  }

  login(event) {
    event.preventDefault();
    key.set(byId("key").value);
    byId("key").value = "";
    this.start();
  }

  start() {
    this.run += 1;
    this.isOpen = false;
    clearTimeout(this.timer);
    this.poll(this.run);
  }

  async poll(run) {
    let wait;
    try {
      const blocks = `admin/blocks?engine=${this.engines.chosen}`;
      const [map, state] = await Promise.all([ask(blocks), ask("admin/state")]);
      if (run !== this.run) return;
      this.failures = 0;
      await this.show(map, state);
      wait = Math.max(MIN_INTERVAL_MS, map.interval_seconds * 1000);
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      if (run !== this.run) return;
      if (error.field === "engine" && this.engines.chosen) {
        this.engines.lost();
        return this.poll(run);
      }
      this.failures += 1;
      this.fail(error);
      if ([401, 403, 409].includes(error.status)) return; // asking again would not help
      wait = Math.min(MAX_RETRY_MS, MIN_INTERVAL_MS * 2 ** (this.failures - 1));
    }
    this.interval = wait;
    if (!document.hidden) this.timer = setTimeout(() => this.poll(run), wait);
    this.tick();
  }

  async show(map, state) {
    this.readAt = Date.now();
    this.lost = null;
    document.body.classList.remove("stale");
    byId("login").hidden = true;
    byId("view").hidden = byId("lock").hidden = false;
    if (!this.isOpen) {
      this.isOpen = true;
      drawLegend(byId("legend"));
      await this.policy.load();
    }
    const pool = state.pool, now = this.readAt / 1000;
    this.samples.add({
      time: now, waste: pool.waste_ratio, theta: pool.effective_theta_f, retained: pool.retained_blocks, ideal: pool.ideal_blocks,
    });
    this.engines.show(state.engines);
    this.map.show(map);
    this.waste.draw(this.samples.list, now);
    this.blocks.draw(this.samples.list, now);
    showNumbers(byId("numbers"), state);
    showRequests(byId("requests"), byId("requests-note"), state.requests);
    await this.policy.seen(map.policy_version);
  }

  fail(error) {
    this.samples.gap();
    this.lost ??= { since: Date.now() };
    this.lost.why = error.message;
    document.body.classList.add("stale");
    if ([401, 403, 409].includes(error.status)) {
      if (error.status === 401) key.forget();
      byId("login").hidden = error.status !== 401;
      byId("login-error").textContent = error.status === 401 ? error.message : "";
      if (error.status === 401) byId("key").focus();
    }
    this.tick();
  }

  // A page that nobody sees asks for nothing; what it missed is a gap.
  visibility() {
    if (!key.get() || !this.isOpen) return;
    clearTimeout(this.timer);
    if (document.hidden) this.samples.gap();
    else this.resume();
  }

  resume() {
    clearTimeout(this.timer);
    this.run += 1;
    this.poll(this.run);
  }

  // The state is announced when it changes; its age, which changes every second, is not.
  tick() {
    const status = byId("status"), age = byId("age");
    status.classList.toggle("lost", this.lost !== null);
    let text = status.textContent;
    if (this.lost) {
      const shown = this.readAt ? ` Showing the reading of ${clock(this.readAt)}.` : "";
      text = `Disconnected since ${clock(this.lost.since)}: ${this.lost.why}.${shown}`;
      age.textContent = `For ${ago(this.lost.since)}.`;
    } else if (this.readAt) {
      text = "Connected.";
      age.textContent = `Read ${ago(this.readAt)} ago, every ${((this.interval ?? MIN_INTERVAL_MS) / 1000).toFixed(1)} s.`;
    }
    if (text !== status.textContent) status.textContent = text;
  }
}

function clock(time) {
  return new Date(time).toLocaleTimeString();
}

function ago(time) {
  const seconds = Math.round((Date.now() - time) / 1000);
  return seconds < 120 ? `${seconds} s` : `${Math.round(seconds / 60)} min`;
}

function showNumbers(list, { pool, engine }) {
  const numbers = [
    ["waste ratio F", pool.waste_ratio.toFixed(2)],
    ["blocks retained", pool.retained_blocks],
    ["ideal", pool.ideal_blocks],
    ["free of " + pool.total_blocks, pool.free_blocks],
    ["tokens live", pool.live_tokens],
    ["tokens evicted", pool.dead_tokens],
    ["requests running", engine.running],
    ["waiting", engine.waiting],
    ["blocks at most half full", percent(pool.low_utilization_block_ratio)],
  ];
  list.replaceChildren(...numbers.map(([name, value]) => {
    const pair = document.createElement("div"), term = document.createElement("dt"), number = document.createElement("dd");
    term.textContent = name;
    number.textContent = value;
    pair.append(term, number);
    return pair;
  }));
}

new Page();
