"use strict";
// What the other scripts share. Text of the run is shown by textContent alone: none of it is ever markup.
const R = { data: JSON.parse(document.getElementById("data").textContent) };

R.by = (id) => document.getElementById(id);

R.el = (tag, attributes = {}, ...children) => {
  const svg = ["svg", "g", "rect", "text", "line", "title"].includes(tag) && attributes.svg;
  const node = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "svg" || value === undefined || value === null) continue;
    if (name === "style") for (const [key, to] of Object.entries(value)) { if (key.startsWith("--")) node.style.setProperty(key, to); else node.style[key] = to; }
    else if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value);
  }
  for (const child of children) node.append(child);
  return node;
};

R.fill = (node, ...children) => { node.replaceChildren(...children.filter((child) => child !== null && child !== undefined)); return node; };

// One colour per thing, everywhere.
R.colours = {
  "training": "training", "stepping": "stepping", "packing": "books", "waiting for first group": "first",
  "waiting for groups": "waiting", "waiting for rewards": "rewards", "publishing": "publishing",
  "evaluating": "evaluating", "saving": "books", "bookkeeping": "idle", "generating": "generating",
  "starved": "waiting", "idle tail": "idle", "between periods": "books", "away": "stepping", "prefill": "prefill", "reward": "rewards",
};
R.pale = new Set(["bookkeeping", "idle tail", "waiting for groups", "waiting for first group", "starved"]);
R.ink = (name) => getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
R.colour = (state) => R.ink(R.colours[state] || "books");

R.seconds = (value) => value >= 100 ? value.toFixed(0) + " s" : value >= 10 ? value.toFixed(1) + " s"
  : value >= 1 ? value.toFixed(2) + " s" : value >= 0.001 ? (value * 1000).toFixed(value >= 0.1 ? 0 : 1) + " ms" : "0 ms";
R.together = (text) => text.replace(/(\d) (s|%|ms)\b/g, "$1\u00a0$2"); // a number and its unit stay on one line
R.named = (run) => run.folder === run.mode ? run.mode : `${run.folder} · ${run.mode}`;
R.share = (value) => value >= 0.0995 ? (100 * value).toFixed(0) + " %" : (100 * value).toFixed(1) + " %";
R.number = (value) => {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size < 0.001 || size >= 1e6)) return value.toExponential(1).replace("e+", "e");
  return size >= 100 ? Math.round(value).toLocaleString("en") : size >= 10 ? value.toFixed(1) : value.toFixed(3);
};

R.tip = (x, y, ...lines) => {
  const tip = R.by("tip");
  if (!lines.length) { tip.hidden = true; return; }
  R.fill(tip, ...lines.map((line, place) => R.el(place ? "div" : "b", {}, line)));
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  const left = x + 16 + box.width > innerWidth ? x - box.width - 12 : x + 16;
  tip.style.left = Math.min(innerWidth - box.width - 4, Math.max(4, left)) + "px";
  tip.style.top = Math.max(4, Math.min(innerHeight - box.height - 4, y + 14)) + "px";
};

R.legend = (node, states) => R.fill(node, ...states.map(([name, colour]) =>
  R.el("span", {}, R.el("i", { style: { background: `var(--${colour})` } }), name)));

// Light or dark: the system's choice, until the button (or t) says otherwise.
R.theme = {
  stored() { try { return localStorage.getItem("rondo-theme"); } catch { return null; } },
  apply(name) {
    document.documentElement.dataset.theme = name;
    R.by("theme").textContent = name === "dark" ? "☾" : "☀";
  },
  start(changed) {
    const system = matchMedia("(prefers-color-scheme: dark)");
    const now = () => R.theme.stored() || (system.matches ? "dark" : "light");
    const flip = () => {
      const name = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
      try { localStorage.setItem("rondo-theme", name); } catch { /* a file may have no storage */ }
      R.theme.apply(name);
      changed();
    };
    R.theme.apply(now());
    system.addEventListener("change", () => { R.theme.apply(now()); changed(); });
    R.by("theme").addEventListener("click", flip);
    addEventListener("keydown", (event) => {
      if (event.key === "t" && !event.ctrlKey && !event.metaKey && !/INPUT|SELECT|TEXTAREA/.test(event.target.tagName)) flip();
    });
  },
};
