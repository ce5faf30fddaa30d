"use strict";
// Time that adds up: a bar per lane for the whole run, a stacked column per period for one lane.
R.account = {
  lane: "trainer",
  chosen: null,
  lanes(line) {
    return { trainer: line.trainer_seconds, ...Object.fromEntries(line.engine_seconds.map((seconds, number) => [`engine ${number}`, seconds])) };
  },
  order(states, lane) {
    const { trainer, engine } = R.data.states, known = lane === "trainer" ? [...trainer, ...engine] : [...engine, ...trainer];
    return [...new Set(states)].sort((a, b) => known.indexOf(a) - known.indexOf(b));
  },
  draw(pick) {
    this.pick = pick || this.pick;
    const rows = [], names = new Set();
    for (const run of R.data.runs) {
      const totals = {};
      for (const line of run.metrics) for (const [lane, seconds] of Object.entries(this.lanes(line))) {
        if (run === R.data.runs[0]) names.add(lane);
        totals[lane] = totals[lane] || {};
        for (const [state, value] of Object.entries(seconds)) totals[lane][state] = (totals[lane][state] || 0) + value;
      }
      if (R.data.runs.length > 1) rows.push(R.el("h3", { style: { marginTop: "1rem" } }, R.named(run)));
      for (const [lane, seconds] of Object.entries(totals)) rows.push(this.bar(lane, seconds));
    }
    R.fill(R.by("account"), ...rows);
    if (!names.has(this.lane)) this.lane = "trainer";
    R.fill(R.by("account-lanes"), ...[...names].map((name) => R.el("button", { type: "button", "aria-pressed": String(name === this.lane), onclick: () => { this.lane = name; this.draw(); } }, name)));
    this.periods();
  },
  bar(lane, seconds) {
    const whole = Object.values(seconds).reduce((sum, value) => sum + value, 0) || 1;
    const pieces = this.order(Object.keys(seconds), lane).map((state) => {
      const share = seconds[state] / whole;
      return R.el("i", {
        class: R.pale.has(state) ? "dim" : "", style: { width: 100 * share + "%", background: `var(--${R.colours[state] || "books"})` },
        title: `${state}: ${R.seconds(seconds[state])}, ${R.share(share)}`,
      }, this.label(state, share));
    });
    const words = this.order(Object.keys(seconds), lane).map((state) => `${state} ${R.share(seconds[state] / whole)}`).join(", ");
    return R.el("div", { class: "lane" }, R.el("span", {}, lane), R.el("div", { class: "bar", role: "img", "aria-label": `${lane}: ${words}` }, ...pieces));
  },
  label(state, share) {
    const room = share * (R.by("account").clientWidth - 105), long = `${state} ${R.share(share)}`;
    return room > 7 * long.length ? long : room > 40 ? R.share(share) : "";
  },
  periods() {
    const lines = R.data.runs[0].metrics, host = R.by("account-periods");
    if (!lines.length) { R.fill(host); return; }
    const width = Math.max(280, host.clientWidth), height = 220, left = 38, bottom = 20, top = 6;
    const step = Math.max(1, Math.ceil(lines.length / Math.floor((width - left) / 6)));
    const shown = lines.filter((_, number) => number % step === 0);
    const seconds = shown.map((line) => this.lanes(line)[this.lane] || {});
    const tallest = Math.max(...shown.map((line) => line.seconds)), slot = Math.min(64, (width - left) / shown.length);
    const y = (value) => height - bottom - value / tallest * (height - bottom - top);
    const svg = R.el("svg", { svg: 1, viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: "none", role: "group", "aria-label": `Seconds per period of ${this.lane}` });
    for (const share of [0, 0.5, 1]) {
      svg.append(R.el("line", { svg: 1, x1: left, x2: width, y1: y(share * tallest), y2: y(share * tallest), stroke: R.ink("line") }));
      svg.append(R.el("text", { svg: 1, x: left - 5, y: y(share * tallest) + 4, "text-anchor": "end" }, R.number(share * tallest)));
    }
    const states = this.order(seconds.flatMap((one) => Object.keys(one)), this.lane);
    shown.forEach((line, number) => {
      let sum = 0;
      const x = left + number * slot, gap = slot > 4 ? Math.min(3, slot * 0.18) : 0;
      const words = states.filter((state) => seconds[number][state] > 0.005 * line.seconds).map((state) => `${state} ${R.seconds(seconds[number][state])}`);
      const choose = () => this.pick && this.pick(line.period);
      const column = R.el("g", {
        svg: 1, class: "period" + (line.period === this.chosen ? " chosen" : ""), tabindex: number ? -1 : 0, role: "button", "aria-label": `period ${line.period}: ${words.join(", ")}`,
        onclick: choose, onkeydown: (event) => this.key(event, choose),
        onpointermove: (event) => R.tip(event.clientX, event.clientY, `period ${line.period} · ${R.seconds(line.seconds)}`, ...words), onpointerleave: () => R.tip(),
      });
      for (const state of states) {
        const value = seconds[number][state] || 0;
        if (!value) continue;
        column.append(R.el("rect", { svg: 1, x: x + gap / 2, width: Math.max(0.5, slot - gap), y: y(sum + value), height: Math.max(0, y(sum) - y(sum + value)), fill: R.colour(state) }));
        sum += value;
      }
      column.append(R.el("rect", { svg: 1, class: "hit", x, width: slot, y: top, height: height - top - bottom }));
      svg.append(column);
      const every = Math.ceil(shown.length / Math.max(4, Math.floor(width / 90)));
      if (number % every === 0) svg.append(R.el("text", { svg: 1, x: x + slot / 2, y: height - 5, "text-anchor": "middle" }, String(line.period)));
    });
    R.fill(host, svg);
    R.legend(R.by("account-legend"), states.map((state) => [state, R.colours[state] || "books"]));
  },
  key(event, choose) {
    const beside = { ArrowRight: "nextElementSibling", ArrowLeft: "previousElementSibling" }[event.key];
    if (event.key === "Enter" || event.key === " ") { event.preventDefault(); choose(); }
    else if (beside) {
      event.preventDefault();
      let next = event.currentTarget[beside];
      while (next && next.tagName !== "g") next = next[beside];
      if (next) { event.currentTarget.tabIndex = -1; next.tabIndex = 0; next.focus(); }
    }
  },
};
