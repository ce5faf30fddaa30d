"use strict";
// One period drawn on a canvas: every group a bar on its engine's lane, every micro-step on the trainer's.
R.Timeline = class {
  constructor(run, view, host) {
    this.run = run;
    this.view = view; // {from, to} in ticks, shared by the timelines that stand together
    this.canvas = R.el("canvas", { tabindex: "0", role: "application", "aria-roledescription": "timeline" });
    this.caption = R.el("h3", {}, "");
    host.append(R.el("div", { class: "timeline" }, this.caption, this.canvas));
    this.chosen = null;
  }

  show(timeline, captioned) {
    this.timeline = timeline;
    this.chosen = null;
    this.caption.textContent = captioned ? `${R.named(this.run)} · ${R.seconds(timeline.seconds)}` : "";
    this.caption.hidden = !captioned;
    const place = Object.fromEntries(R.data.columns.map((name, number) => [name, number]));
    this.groups = timeline.groups.map((row) => Object.fromEntries(Object.entries(place).map(([name, at]) => [name, row[at]])));
    this.lanes = Object.entries(timeline.lanes).map(([name, rows], lane) => ({ name, stretches: rows.map((row) =>
      ({ state: row[0], from: row[1], to: row[2], groups: row[3] || [], tokens: row[4] || 0, lane })) }));
    this.micros = this.lanes.flatMap((lane) => lane.stretches).filter((one) => one.state === "training");
    this.trainedIn = new Map();
    for (const micro of this.micros) for (const index of micro.groups) {
      if (!this.trainedIn.has(index)) this.trainedIn.set(index, []);
      this.trainedIn.get(index).push(micro);
    }
    this.pack();
    this.canvas.setAttribute("aria-label", this.words());
    this.draw();
  }

  words() {
    return `Timeline of period ${this.timeline.period} of ${this.run.folder}: ${this.groups.length} groups on ` +
      `${this.timeline.engines.length} engine(s), ${this.micros.length} micro-steps on ${this.lanes.length} trainer rank(s). Use plus, minus, arrows, n and b.`;
  }

  // Groups of one engine in as few rows as they need.
  pack() {
    this.rows = this.timeline.engines.map(() => 0);
    const free = this.timeline.engines.map(() => []);
    for (const group of [...this.groups].sort((a, b) => a.sent - b.sent)) {
      const engine = Math.max(0, group.engine);
      if (!free[engine]) continue;
      let row = free[engine].findIndex((end) => end <= group.sent);
      if (row < 0) row = free[engine].push(0) - 1;
      free[engine][row] = group.arrived;
      group.row = row;
      this.rows[engine] = Math.max(this.rows[engine], row + 1);
    }
  }

  layout(width) {
    const narrow = width < 560;
    const gutter = narrow ? 0 : 76, head = narrow ? 17 : 0, gap = 12;
    let top = 8;
    const places = [];
    const share = Math.max(46, Math.min(190, 330 / Math.max(1, this.rows.length)));
    for (const rows of this.rows) {
      const height = Math.max(26, Math.min(share, rows * 13));
      places.push({ top: top + head, height, row: height / Math.max(1, rows) });
      top += head + height + gap;
    }
    const trainers = this.lanes.map((_, number) => {
      const height = number ? 24 : 38, at = { top: top + head, height };
      top += head + height + (number ? 4 : 8);
      return at;
    });
    return { gutter, head, engines: places, trainers, bottom: top, height: top + 24, width, plot: width - gutter };
  }

  x(tick) { return this.place.gutter + (tick - this.view.from) / (this.view.to - this.view.from) * this.place.plot; }
  tick(x) { return this.view.from + (x - this.place.gutter) / this.place.plot * (this.view.to - this.view.from); }

  draw() {
    const width = this.canvas.clientWidth || 800;
    const place = this.place = this.layout(width), ratio = devicePixelRatio || 1;
    this.canvas.style.height = place.height + "px";
    this.canvas.width = Math.round(width * ratio);
    this.canvas.height = Math.round(place.height * ratio);
    const pen = this.pen = this.canvas.getContext("2d");
    pen.scale(ratio, ratio);
    pen.font = "11.5px ui-sans-serif, system-ui, sans-serif";
    pen.textBaseline = "middle";
    this.drawAxis();
    pen.save();
    pen.beginPath();
    pen.rect(place.gutter, 0, place.plot, place.height);
    pen.clip();
    this.drawBands();
    this.drawAway();
    this.drawGroups();
    this.drawTrainers();
    this.drawBuckets();
    this.drawLink();
    pen.restore();
    this.drawNames();
    this.drawSelection();
  }

  drawAxis() {
    const pen = this.pen, place = this.place, span = (this.view.to - this.view.from) / R.data.ticks;
    const rough = span / Math.max(3, place.plot / 110), power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((m) => m * power).find((size) => size >= rough);
    pen.strokeStyle = R.ink("line");
    pen.fillStyle = R.ink("faint");
    pen.textAlign = "center";
    for (let at = Math.ceil(this.view.from / R.data.ticks / step) * step; at * R.data.ticks <= this.view.to; at += step) {
      const x = Math.round(this.x(at * R.data.ticks)) + 0.5;
      pen.beginPath(); pen.moveTo(x, 4); pen.lineTo(x, place.bottom); pen.stroke();
      const digits = Math.max(0, -Math.floor(Math.log10(step)));
      if (x > place.gutter + 8 && x < place.width - 12) pen.fillText(at.toFixed(digits) + " s", x, place.bottom + 11);
    }
  }

  bar(from, to, top, height, colour, alpha = 1) {
    const left = this.x(from), right = Math.max(this.x(to), left + 0.75);
    if (right < this.place.gutter || left > this.place.width) return;
    this.pen.globalAlpha = alpha;
    this.pen.fillStyle = colour;
    const w = right - left;
    if (w > 5 && height > 5) { this.pen.beginPath(); this.pen.roundRect(left, top, w - 0.5, height, Math.min(3, height / 3)); this.pen.fill(); }
    else this.pen.fillRect(left, top, Math.max(w - (w > 2 ? 0.5 : 0), 0.75), height);
    this.pen.globalAlpha = 1;
  }

  // Publication and evaluation concern all lanes.
  drawBands() {
    for (const one of this.lanes[0] ? this.lanes[0].stretches : []) {
      if (one.state !== "publishing" && one.state !== "evaluating") continue;
      const left = this.x(one.from), width = Math.max(1.5, this.x(one.to) - left);
      this.pen.globalAlpha = 0.16;
      this.pen.fillStyle = R.colour(one.state);
      this.pen.fillRect(left, 2, width, this.place.bottom - 4);
      this.pen.globalAlpha = 1;
    }
  }

  drawAway() {
    this.timeline.engines.forEach((engine, number) => {
      const place = this.place.engines[number];
      for (const [from, to] of engine.away) {
        this.bar(from, to, place.top, place.height, R.colour("away"), 0.18);
        const left = Math.max(this.place.gutter, this.x(from)), width = Math.min(this.place.width, this.x(to)) - left;
        this.pen.fillStyle = R.ink("soft");
        this.pen.textAlign = "center";
        if (width > 40) this.pen.fillText("away", left + width / 2, place.top + place.height / 2);
      }
    });
  }

  lit(group) {
    if (!this.chosen) return true;
    return this.chosen.group ? this.chosen.group === group : this.chosen.state === "training" && this.chosen.groups.includes(group.group);
  }

  drawGroups() {
    for (const group of this.groups) {
      const place = this.place.engines[Math.max(0, group.engine)];
      if (!place || group.row === undefined) continue;
      const height = Math.max(1.2, place.row - (place.row > 5 ? 1.5 : place.row > 2.5 ? 0.6 : 0));
      const top = place.top + group.row * place.row, alpha = this.lit(group) ? 1 : 0.22;
      const main = R.ink("generating");
      if (group.admitted === null) { this.bar(group.sent, group.arrived, top, height, main, alpha * 0.85); continue; }
      this.bar(group.sent, group.arrived, top, height, main, alpha * 0.28);
      this.bar(group.admitted, group.finished, top, height, main, alpha * (group.kept ? 0.95 : 0.5));
      this.bar(group.admitted, group.first_token, top, height, R.ink("prefill"), alpha);
    }
  }

  drawTrainers() {
    this.lanes.forEach((lane, number) => {
      const place = this.place.trainers[number];
      for (const one of lane.stretches) {
        if (one.state === "bookkeeping" || one.state === "idle") continue;
        const waits = one.state.startsWith("waiting"), inset = waits ? place.height * 0.36 : 0;
        const dim = this.chosen && !this.touches(one) ? 0.25 : 1;
        this.bar(one.from, one.to, place.top + inset, place.height - 2 * inset, R.colour(one.state), dim);
      }
    });
  }

  // Buckets of weights on their way: they overlap each other, and lie inside the publication.
  drawBuckets() {
    const place = this.place.trainers[0];
    if (!place) return;
    this.timeline.buckets.forEach(([from, to], number) => this.bar(from, to, place.top + place.height - 12 + 5 * (number % 2), 4, R.ink("paper"), 0.8));
  }

  touches(stretch) {
    if (this.chosen === stretch) return true;
    return Boolean(this.chosen.group) && (this.trainedIn.get(this.chosen.group.group) || []).includes(stretch);
  }

  // From a chosen group to the micro-steps that trained it.
  drawLink() {
    if (!this.chosen || !this.chosen.group) return;
    const group = this.chosen.group, from = this.place.engines[Math.max(0, group.engine)];
    if (!from) return;
    const pen = this.pen, y = from.top + (group.row + 0.5) * from.row;
    this.bar(group.arrived, group.scored, y - Math.max(1.5, from.row * 0.25), Math.max(3, from.row * 0.5), R.ink("rewards"));
    for (const micro of this.trainedIn.get(group.group) || []) {
      const a = this.x(group.scored), b = this.x(micro.from) + 2, to = this.place.trainers[micro.lane];
      pen.strokeStyle = R.ink("ink");
      pen.lineWidth = 1.4;
      pen.beginPath(); pen.moveTo(a, y); pen.bezierCurveTo(a + 12, (y + to.top) / 2, b - 12, (y + to.top) / 2, b, to.top); pen.stroke();
      pen.lineWidth = 1;
    }
  }

  drawNames() {
    const pen = this.pen, place = this.place;
    pen.textAlign = "left";
    const write = (text, at) => {
      pen.fillStyle = R.ink("soft");
      if (place.head) pen.fillText(text, 2, at.top - 9); else pen.fillText(text, 0, at.top + at.height / 2);
    };
    place.engines.forEach((at, number) => write(this.timeline.engines[number].name.replace("-", " "), at));
    place.trainers.forEach((at, number) => write(this.lanes[number].name.replace("-", " "), at));
  }

  drawSelection() {
    if (!this.selection) return;
    const [a, b] = this.selection.map((tick) => this.x(tick));
    this.pen.globalAlpha = 0.15;
    this.pen.fillStyle = R.ink("accent");
    this.pen.fillRect(Math.min(a, b), 0, Math.abs(b - a), this.place.bottom);
    this.pen.globalAlpha = 1;
  }

  // What is under a point: a group, a stretch of the trainer, or nothing.
  under(x, y) {
    const tick = this.tick(x), slack = (this.view.to - this.view.from) / this.place.plot * 2;
    const engine = this.place.engines.findIndex((at) => y >= at.top && y < at.top + at.height);
    if (engine >= 0) {
      const row = Math.floor((y - this.place.engines[engine].top) / this.place.engines[engine].row);
      const group = this.groups.find((one) => Math.max(0, one.engine) === engine && one.row === row && one.sent - slack <= tick && tick <= one.arrived + slack);
      return group ? { group } : null;
    }
    const lane = this.place.trainers.findIndex((at) => y >= at.top && y < at.top + at.height);
    if (lane < 0) return null;
    return this.lanes[lane].stretches.find((one) => one.from - slack <= tick && tick <= one.to + slack) || null;
  }

  describe(item) {
    const per = R.data.ticks, time = (from, to) => R.seconds((to - from) / per);
    if (!item.group) {
      const lines = [item.state === "training" ? `micro-step: ${item.groups.length} group(s), ${item.tokens} tokens` : item.state, time(item.from, item.to)];
      return item.state === "training" ? [...lines, `${Math.round(item.tokens / Math.max(1e-9, (item.to - item.from) / per)).toLocaleString("en")} tokens/s`] : lines;
    }
    const g = item.group, micros = this.trainedIn.get(g.group) || [];
    return [
      `group ${g.group} · reward ${R.number(g.reward)}`,
      `${g.prompt_tokens} prompt + ${g.response_tokens} response tokens in ${g.samples} samples (longest ${g.longest})`,
      g.admitted === null ? `answered after ${time(g.sent, g.arrived)}` : `prefill ${time(g.admitted, g.first_token)}, decode ${time(g.first_token, g.finished)}`,
      `reward ${time(g.arrived, g.scored)}` + (micros.length ? `, then ${time(g.scored, Math.max(g.scored, micros[0].from))} until trained` : g.kept ? ", no gradient: not trained" : ", filtered out"),
    ];
  }
};
