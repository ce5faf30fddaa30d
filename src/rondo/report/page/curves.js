"use strict";
// Curves over periods, small and many; pointing at one points at all.
R.CURVES = [
  { title: "Reward", note: "mean over a period's responses; dots: held-out prompts", keys: ["reward_mean"], evals: true, digits: 3 },
  { title: "Response length", note: "tokens: mean, and the longest", keys: ["length_mean", "length_max"] },
  { title: "Cut responses", note: "share that reached max_new_tokens", keys: ["cut_fraction"] },
  { title: "KL to the reference", note: "per token", keys: ["kl"] },
  { title: "Entropy", note: "of the policy, estimated from the samples", keys: ["entropy"] },
  { title: "Gradient norm", note: "before clipping", keys: ["gradient_norm"] },
  { title: "Log-prob gap", note: "|engine − trainer| per token: mean and largest", keys: ["logp_gap_mean", "logp_gap_max"], log: true },
  { title: "Seconds per period", note: "wall clock", keys: ["seconds"] },
  { title: "Tokens per second", note: "responses generated, over the whole period", keys: ["_speed"] },
  { title: "Learning rate", note: "", keys: ["learning_rate"] },
];

R.value = (line, key) => {
  const value = key === "_speed" ? line.tokens / line.seconds : line[key];
  return value === undefined || value === null || !Number.isFinite(value) ? null : value;
};

R.curves = {
  plots: [],
  draw() {
    for (const plot of this.plots) plot.destroy();
    this.plots = [];
    const host = R.by("curves"), runs = R.data.runs;
    R.fill(host);
    const parts = Object.keys(runs[0].metrics[0] || {}).filter((key) => key.startsWith("reward/"));
    const extra = parts.length > 1 ? [{ title: "Reward by function", note: parts.map((key) => key.slice(7)).join(", "), keys: parts }] : [];
    for (const curve of [R.CURVES[0], ...extra, ...R.CURVES.slice(1)]) {
      if (runs.some((run) => run.metrics.some((line) => curve.keys.some((key) => R.value(line, key) !== null)))) this.one(host, curve, runs);
    }
  },
  one(host, curve, runs) {
    const last = Math.max(...runs.map((run) => run.metrics.length ? run.metrics[run.metrics.length - 1].period : 0));
    const xs = Array.from({ length: last + 2 }, (_, number) => number); // version p: before period p
    const series = [{}], data = [xs], colours = ["generating", "training", "publishing", "evaluating", "rewards"];
    runs.forEach((run, second) => {
      const lines = new Map(run.metrics.map((line) => [line.period, line]));
      curve.keys.forEach((key, number) => {
        const ys = xs.map((x) => lines.has(x) ? R.value(lines.get(x), key) : null);
        if (ys.every((y) => y === null)) return;
        data.push(curve.log ? ys.map((y) => y > 0 ? y : null) : ys);
        series.push({ stroke: R.ink(second ? "faint" : colours[number % colours.length]), width: second ? 1.2 : 1.8, dash: second ? [4, 3] : undefined, points: { show: xs.length < 4 }, spanGaps: true, alpha: number ? 0.8 : 1 });
      });
      if (!curve.evals || !run.evals.length) return;
      const evals = new Map(run.evals.map((one) => [one.version, one.reward_mean]));
      data.push(xs.map((x) => evals.has(x) ? evals.get(x) : null));
      series.push({ stroke: R.ink(second ? "faint" : "training"), width: second ? 0.8 : 1.2, spanGaps: true, points: { show: true, size: 6, fill: R.ink(second ? "faint" : "training") } });
    });
    if (data.length < 2) return;
    const output = R.el("output", {}, this.said(data, data[1].findLastIndex((y) => y !== null)));
    const body = R.el("div");
    host.append(R.el("div", { class: "curve" }, R.el("h3", {}, curve.title, output), R.el("p", {}, curve.note), body));
    const axis = { stroke: R.ink("faint"), grid: { stroke: R.ink("line"), width: 1 }, ticks: { show: false }, font: "11px system-ui", size: 44 };
    const marks = (_, values) => values.map((value) => value === null ? "" : curve.log ? value.toExponential(0) : Math.abs(value) >= 1e4 ? (value / 1000).toFixed(0) + "k" : String(+value.toPrecision(3)));
    this.plots.push(new uPlot({
      width: body.clientWidth || 320, height: 150, legend: { show: false }, padding: [8, 6, 0, 0],
      scales: { x: { time: false }, y: curve.log ? { distr: 3 } : { range: (_, low, high) => low === high ? [low - Math.abs(low || 1) * 0.1, high + Math.abs(high || 1) * 0.1] : uPlot.rangeNum(low, high, 0.08, true) } },
      axes: [{ ...axis, size: 26, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000] }, { ...axis, values: marks }],
      series,
      cursor: { sync: { key: "periods" }, y: false, points: { size: 6 } },
      hooks: { setCursor: [(plot) => { output.textContent = this.said(data, plot.cursor.idx ?? data[1].findLastIndex((y) => y !== null)); }] },
    }, data, body));
  },
  said(data, at) {
    if (at === null || at < 0) return "";
    const values = data.slice(1).map((ys) => ys[at]).filter((y) => y !== null && y !== undefined);
    return values.length ? `${values.map(R.number).join("  ")}  @${data[0][at]}` : "";
  },
  resize() { for (const plot of this.plots) plot.setSize({ width: plot.root.parentNode.clientWidth, height: 150 }); },
};
