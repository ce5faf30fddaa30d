"use strict";
// Responses to read. All text goes in by textContent; what was searched for is marked, nothing else is changed.
R.samples = {
  shown: 40,
  start() {
    for (const id of ["samples-text", "samples-period", "samples-reward", "samples-order"]) R.by(id).addEventListener("input", () => { this.shown = 40; this.draw(); });
    R.by("samples-more").addEventListener("click", () => { this.shown += 40; this.draw(); });
  },
  choices() {
    const samples = this.all();
    const options = (node, list) => { const had = node.value; R.fill(node, ...list.map(([value, text]) => R.el("option", { value }, text))); if (list.some(([value]) => value === had)) node.value = had; };
    options(R.by("samples-period"), [["", "every period"], ...[...new Set(samples.map((one) => one.period))].sort((a, b) => b - a).map((period) => [String(period), `period ${period}`])]);
    const rewards = [...new Set(samples.map((one) => one.reward))].sort((a, b) => b - a);
    const few = rewards.length <= 8;
    options(R.by("samples-reward"), [["", "every reward"], ...(few ? rewards.map((value) => [String(value), `reward ${R.number(value)}`]) : [["above", "above the mean"], ["below", "below the mean"]])]);
  },
  all() { return R.data.runs[0].samples; },
  found() {
    const words = R.by("samples-text").value.toLowerCase(), period = R.by("samples-period").value, reward = R.by("samples-reward").value;
    const mean = this.all().reduce((sum, one) => sum + one.reward, 0) / Math.max(1, this.all().length);
    const fits = (one) => (!words || (one.prompt + "\n" + one.completion).toLowerCase().includes(words)) && (!period || String(one.period) === period) &&
      (!reward || (reward === "above" ? one.reward >= mean : reward === "below" ? one.reward < mean : String(one.reward) === reward));
    const order = { new: (a, b) => b.period - a.period, old: (a, b) => a.period - b.period, best: (a, b) => b.reward - a.reward, worst: (a, b) => a.reward - b.reward }[R.by("samples-order").value];
    return this.all().filter(fits).sort(order);
  },
  draw() {
    this.choices();
    const found = this.found(), words = R.by("samples-text").value;
    const rewards = this.all().map((one) => one.reward), low = Math.min(0, ...rewards), high = Math.max(...rewards, low + 1e-9);
    R.by("samples-count").textContent = `${found.length} of ${this.all().length}`;
    const groups = new Map(); // responses to one prompt stand together
    for (const one of found.slice(0, this.shown)) {
      const key = `${one.period} ${one.ordinal}`;
      if (!groups.has(key)) groups.set(key, []);
      groups.get(key).push(one);
    }
    R.fill(R.by("samples"), ...[...groups.values()].map((list) => R.el("article", {},
      R.el("div", { class: "facts" }, `period ${list[0].period}`, R.el("br"), `prompt ${list[0].ordinal}`),
      R.el("div", {}, this.text("prompt", list[0].prompt, words), ...list.map((one) => R.el("div", { class: "response" },
        R.el("span", { class: "reward", title: `reward ${one.reward}`, style: { "--share": 100 * (one.reward - low) / (high - low) + "%" } }, R.number(one.reward)),
        this.text("completion", one.completion, words), one.stopped === false ? R.el("span", { class: "cut", title: "reached max_new_tokens" }, "cut") : ""))))),
      found.length ? null : R.el("p", { class: "empty" }, this.all().length ? "No sample fits." : "No samples yet."));
    R.by("samples-more").hidden = found.length <= this.shown;
  },
  text(kind, text, words) {
    const node = R.el("pre", { class: kind, "aria-label": kind });
    const low = text.toLowerCase(), sought = words.toLowerCase();
    let from = 0;
    for (let at = sought ? low.indexOf(sought) : -1; at >= 0; at = low.indexOf(sought, from)) {
      node.append(text.slice(from, at), R.el("mark", {}, text.slice(at, at + sought.length)));
      from = at + sought.length;
    }
    node.append(text.slice(from) || (from ? "" : "(empty)"));
    return node;
  },
};
