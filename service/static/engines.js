// The engines behind this server, if there are several: whose blocks the map shows, and each in numbers.

export class Engines {
  // onChoose is called when the reader has chosen another one.
  constructor(group, note, onChoose) {
    Object.assign(this, { group, note, onChoose, chosen: 0, numbers: [] });
    group.addEventListener("change", (event) => {
      this.chosen = Number(event.target.value);
      note.textContent = "";
      onChoose();
    });
  }

  // parts: [{pool, engine}, …]; undefined where there is one engine.
  show(parts = []) {
    this.group.hidden = parts.length < 2;
    if (parts.length !== this.numbers.length) this.build(parts.length); // else the focus would go
    parts.forEach(({ pool, engine }, i) => {
      this.numbers[i].textContent =
        `F ${pool.waste_ratio.toFixed(2)}, ${pool.retained_blocks} blocks retained, ${pool.free_blocks} of ` +
        `${pool.total_blocks} free; ${engine.running} running, ${engine.waiting} waiting`;
    });
    const radio = this.group.querySelector(`input[value="${this.chosen}"]`);
    if (radio) radio.checked = true;
  }

  // The server does not know the chosen one any more.
  lost() {
    this.note.textContent = `Engine ${this.chosen} is gone; this is engine 0.`;
    this.chosen = 0;
  }

  build(count) {
    this.numbers = [];
    const lines = Array.from({ length: count }, (_, i) => {
      const label = document.createElement("label"), radio = document.createElement("input");
      const numbers = document.createElement("span");
      Object.assign(radio, { type: "radio", name: "engine", value: String(i) });
      numbers.className = "note";
      label.append(radio, ` Engine ${i} `, numbers);
      this.numbers.push(numbers);
      return label;
    });
    this.group.replaceChildren(this.group.firstElementChild, ...lines);
  }
}
