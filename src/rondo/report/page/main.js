"use strict";
// The page as a whole: words at the top, which period is shown, proof and config; and, live, news every two seconds.
R.page = {
  view: { from: 0, to: 1, end: 1 },
  at: undefined, // number of the timeline shown; null: the last; not chosen yet: one of usual length

  start() {
    R.theme.start(() => this.draw());
    R.samples.start();
    const host = R.by("timelines");
    this.timelines = R.data.runs.map((run) => new R.Timeline(run, this.view, host));
    this.gestures = new R.Gestures(this.timelines, this.view, (by) => this.turn(by));
    R.by("earlier").onclick = () => this.turn(-1);
    R.by("later").onclick = () => this.turn(1);
    R.by("period").oninput = (event) => this.show(Number(event.target.value));
    R.legend(R.by("timeline-legend"), [["prefill", "prefill"], ["decode", "generating"], ["micro-step", "training"], ["optimizer step", "stepping"], ["waiting", "waiting"], ["rewards", "rewards"], ["publication", "publishing"], ["evaluation", "evaluating"]]);
    let width = innerWidth;
    addEventListener("resize", () => { if (innerWidth !== width) { width = innerWidth; this.gestures.draw(); R.curves.resize(); R.account.periods(); } });
    this.draw();
    if (R.data.live) { R.by("live").hidden = false; setInterval(() => this.renew(), 2000); }
  },

  draw() {
    this.words();
    this.tiles();
    this.show(this.at);
    R.account.draw((period) => this.pick(period));
    R.curves.draw();
    R.samples.draw();
    this.proof();
    this.config();
  },

  async renew() {
    try {
      const answer = await fetch("data.json", { cache: "no-store", headers: this.tag ? { "If-None-Match": this.tag } : {} });
      if (answer.status !== 200) return;
      this.tag = answer.headers.get("ETag");
      const [width, first] = [this.view.to - this.view.from, this.view.from], whole = width >= this.view.end - 1;
      R.data = await answer.json();
      this.timelines.forEach((one, number) => { one.run = R.data.runs[number]; });
      const scroll = scrollY;
      this.draw();
      if (!whole && this.at !== null) this.gestures.set(first, first + width);
      scrollTo(0, scroll);
    } catch { R.by("live").lastChild.textContent = "the run has ended"; }
  },

  words() {
    const run = R.data.runs[0], lines = run.metrics;
    R.by("run-name").textContent = run.folder;
    R.by("run-facts").textContent = `${run.config.model.path} · ${run.config.algorithm.name} · ${run.mode}`;
    R.by("headline").textContent = run.verdict ? R.together(run.verdict.headline) : lines.length ? "This run recorded no spans." : "Waiting for the first period to end.";
    R.by("advice").textContent = run.verdict ? R.together(`${run.verdict.times} ${run.verdict.advice}`) : "";
    R.by("comparison").textContent = R.together(R.data.comparison);
    R.by("comparison").hidden = !R.data.comparison;
  },

  tiles() {
    const run = R.data.runs[0], lines = run.metrics, last = lines[lines.length - 1], verdict = run.verdict;
    if (!last) { R.fill(R.by("tiles")); return; }
    const tokens = lines.reduce((sum, line) => sum + line.tokens, 0), seconds = lines.reduce((sum, line) => sum + line.seconds, 0);
    const evals = run.evals, arrow = (a, b) => `${R.number(a)} → ${R.number(b)}`;
    const tiles = [
      ["Reward", arrow(lines[0].reward_mean, last.reward_mean), `over ${lines.length} periods`],
      evals.length ? ["Held-out reward", evals.length > 1 ? arrow(evals[0].reward_mean, evals[evals.length - 1].reward_mean) : R.number(evals[0].reward_mean), "on prompts never trained"] : null,
      verdict ? ["A period", R.seconds(verdict.seconds), `bound by ${verdict.bound}`] : null,
      verdict && verdict.overlap !== null ? ["Overlap reached", R.share(verdict.overlap), `of ${R.seconds(verdict.possible_seconds)} possible`] : null,
      ["Tokens per second", R.number(tokens / seconds), "generated, all time counted"],
      last.logp_gap_mean !== undefined ? ["Log-prob gap", R.number(last.logp_gap_mean), "engine against trainer, per token"] : null,
    ];
    R.fill(R.by("tiles"), ...tiles.filter(Boolean).map(([name, value, note]) => R.el("div", {}, R.el("dt", {}, name), R.el("dd", {}, value, R.el("small", {}, note)))));
  },

  turn(by) {
    const count = R.data.runs[0].timelines.length;
    if (count) this.show(Math.min(count - 1, Math.max(0, (this.at === null ? count - 1 : this.at) + by)));
  },
  pick(period) {
    const all = R.data.runs[0].timelines.map((one) => Math.abs(one.period - period));
    this.show(all.indexOf(Math.min(...all)));
    R.by("timeline-section").scrollIntoView({ block: "nearest" });
  },
  usual(list) {
    const sorted = list.map((one) => one.seconds).sort((a, b) => a - b), middle = sorted[Math.floor(sorted.length / 2)];
    return list.reduce((best, one, number) => Math.abs(one.seconds - middle) <= Math.abs(list[best].seconds - middle) ? number : best, 0);
  },
  show(at) {
    const lists = R.data.runs.map((run) => run.timelines), slider = R.by("period");
    if (!lists[0].length) { R.by("timelines").hidden = true; return; }
    R.by("timelines").hidden = false;
    if (at === undefined) at = R.data.live ? null : this.usual(lists[0]);
    const number = at === null || at >= lists[0].length ? lists[0].length - 1 : at;
    this.at = at === null || (R.data.live && number === lists[0].length - 1) ? null : number;
    slider.max = lists[0].length - 1;
    slider.value = number;
    const period = lists[0][number].period, shown = lists.map((list) => list.reduce((best, one) => best && Math.abs(best.period - period) <= Math.abs(one.period - period) ? best : one, null));
    slider.setAttribute("aria-valuetext", `period ${period}`);
    R.by("period-name").textContent = lists[0].length < R.data.runs[0].metrics.length ? `${period} (${lists[0].length} of ${R.data.runs[0].metrics.length} kept)` : period;
    this.view.end = Math.max(...shown.filter(Boolean).map((one) => one.seconds)) * R.data.ticks;
    this.view.from = 0;
    this.view.to = this.view.end;
    this.timelines.forEach((one, place) => { if (shown[place]) one.show(shown[place], shown.length > 1); });
    if (R.account.chosen !== period) { R.account.chosen = period; if (R.account.pick) R.account.periods(); }
  },

  proof() {
    const { periods, verified } = R.data.runs[0].certificate, children = [];
    if (periods.length) {
      const sum = (name) => periods.reduce((total, one) => total + (one[name] || 0), 0);
      const gap = Math.max(...periods.map((one) => one.logp_gap_max || 0));
      children.push(R.el("p", {}, `On-policy in all ${periods.length} periods: every one of ${sum("groups").toLocaleString("en")} groups (${sum("samples").toLocaleString("en")} samples) was sampled from its period's own weights and settled exactly once; no engine's log-prob was off by more than ${R.number(gap)}.`));
    } else children.push(R.el("p", {}, "This run keeps no ledger."));
    if (!verified) children.push(R.el("p", {}, "Not verified yet: ", R.el("code", {}, `rondo verify ${R.data.runs[0].path}`), " trains the recorded groups again through the synchronous schedule and compares every tensor."));
    else {
      children.push(R.el("p", {}, R.el("span", { class: verified.verdict === "holds" ? "yes" : "no" }, verified.verdict === "holds" ? "The proof holds." : "The proof fails."), " The recorded groups were trained again, in other ways; what each way promises, and what was found:"));
      const promises = { bits: "same bits", bound: "rounding", none: "nothing" };
      const rows = (verified.lines || []).map((line) => R.el("tr", {},
        R.el("td", { class: line.holds ? "yes" : "no" }, line.holds ? "holds" : "broken"),
        ...[`${line.what}, ${line.name}`, promises[line.promise] || line.promise, line.elements ? R.share(line.differing / line.elements) : "", line.elements ? R.number(line.relative) : "", line.of_bound === null || line.of_bound === undefined ? "" : R.number(line.of_bound)].map((cell) => R.el("td", {}, cell))));
      const heads = ["", "against the synchronous", "promised", "numbers that differ", "relative", "of bound"];
      children.push(R.el("div", { class: "scroll", tabindex: "0" }, R.el("table", {}, R.el("thead", {}, R.el("tr", {}, ...heads.map((name) => R.el("th", {}, name)))), R.el("tbody", {}, ...rows))));
    }
    R.fill(R.by("proof"), ...children);
  },

  config() {
    const flat = (tree, prefix = "") => Object.entries(tree).flatMap(([key, value]) => value && typeof value === "object" && !Array.isArray(value) ? flat(value, prefix + key + ".") : [[prefix + key, value]]);
    R.fill(R.by("config"), ...Object.entries(R.data.runs[0].config).map(([name, section]) => R.el("details", { open: "" }, R.el("summary", {}, name),
      ...flat(section).map(([key, value]) => R.el("div", {}, R.el("span", {}, key), R.el("span", { class: "mono" }, value === "" ? "–" : typeof value === "string" ? value : JSON.stringify(value)))))));
  },
};
R.page.start();
