"use strict";
// Zooming, moving and pointing: mouse, touch and keyboard, for all timelines that stand together.
R.Gestures = class {
  constructor(timelines, view, turn) {
    this.timelines = timelines;
    this.view = view;
    this.turn = turn; // to another period
    this.fingers = new Map();
    for (const one of timelines) this.listen(one);
    R.by("zoom-in").onclick = () => this.zoom(0.5);
    R.by("zoom-out").onclick = () => this.zoom(2);
    R.by("zoom-all").onclick = () => this.all();
  }

  draw() { for (const one of this.timelines) if (one.timeline) one.draw(); }
  all() { this.set(0, this.view.end); }
  set(from, to) {
    const width = Math.min(Math.max(to - from, 20), this.view.end);
    const start = Math.min(Math.max(0, from), this.view.end - width);
    this.view.from = start;
    this.view.to = start + width;
    this.draw();
  }
  zoom(factor, at = (this.view.from + this.view.to) / 2) {
    this.set(at - (at - this.view.from) * factor, at + (this.view.to - at) * factor);
  }
  move(share) {
    const by = share * (this.view.to - this.view.from);
    this.set(this.view.from + by, this.view.to + by);
  }

  choose(one, item, x, y) {
    for (const other of this.timelines) { const had = other.chosen; other.chosen = other === one ? item : null; if (had !== other.chosen) other.draw(); }
    if (!item) { R.tip(); return; }
    R.tip(x, y, ...one.describe(item));
  }

  listen(one) {
    const canvas = one.canvas, place = (event) => { const box = canvas.getBoundingClientRect(); return [event.clientX - box.left, event.clientY - box.top]; };
    canvas.addEventListener("pointerdown", (event) => {
      const [x] = place(event);
      canvas.setPointerCapture(event.pointerId);
      this.fingers.set(event.pointerId, x);
      this.start = { x, tick: one.tick(x), from: this.view.from, to: this.view.to, pan: event.shiftKey || event.pointerType === "touch" };
      if (this.fingers.size === 2) this.pinch = { ticks: [...this.fingers.values()].map((at) => one.tick(at)) };
    });
    canvas.addEventListener("pointermove", (event) => {
      const [x, y] = place(event);
      if (!this.fingers.has(event.pointerId)) { this.choose(one, one.under(x, y), event.clientX, event.clientY); return; }
      this.fingers.set(event.pointerId, x);
      if (this.fingers.size === 2) this.spread(one);
      else if (this.start.pan) { const by = (this.start.x - x) / one.place.plot * (this.start.to - this.start.from); this.set(this.start.from + by, this.start.to + by); }
      else if (Math.abs(x - this.start.x) > 4) { R.tip(); for (const each of this.timelines) each.selection = [this.start.tick, one.tick(x)]; this.draw(); }
    });
    const up = (event) => {
      const [x, y] = place(event);
      this.fingers.delete(event.pointerId);
      this.pinch = null;
      if (one.selection) {
        const ends = [...one.selection].sort((a, b) => a - b);
        for (const each of this.timelines) each.selection = null;
        this.set(...ends);
      } else if (event.type === "pointerup" && this.start && Math.abs(x - this.start.x) < 4) this.choose(one, one.under(x, y), event.clientX, event.clientY);
    };
    canvas.addEventListener("pointerup", up);
    canvas.addEventListener("pointercancel", up);
    canvas.addEventListener("pointerleave", () => { if (!this.fingers.size) this.choose(one, null); });
    canvas.addEventListener("dblclick", () => this.all());
    canvas.addEventListener("wheel", (event) => {
      if (!event.ctrlKey && document.activeElement !== canvas) return; // else the page scrolls, as it should
      event.preventDefault();
      if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) this.move(event.deltaX / 600);
      else this.zoom(Math.exp(event.deltaY / 400), one.tick(place(event)[0]));
    }, { passive: false });
    canvas.addEventListener("keydown", (event) => { if (this.key(one, event)) event.preventDefault(); });
    canvas.addEventListener("blur", () => this.choose(one, null));
  }

  spread(one) {
    const [a, b] = this.pinch.ticks, [x, y] = [...this.fingers.values()], plot = one.place.plot, gutter = one.place.gutter;
    if (Math.abs(y - x) < 8) return;
    const width = (b - a) / (y - x) * plot;
    if (width > 0) this.set(a - (x - gutter) / plot * width, a - (x - gutter) / plot * width + width);
  }

  key(one, event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return false;
    const deeds = {
      "+": () => this.zoom(0.5), "=": () => this.zoom(0.5), "-": () => this.zoom(2), "−": () => this.zoom(2), "0": () => this.all(),
      "ArrowLeft": () => this.move(-0.2), "ArrowRight": () => this.move(0.2), "Home": () => this.set(0, this.view.to - this.view.from),
      "End": () => this.set(this.view.end, this.view.end + 1 + this.view.to - this.view.from),
      "PageUp": () => this.turn(-1), "PageDown": () => this.turn(1), "n": () => this.step(one, 1), "b": () => this.step(one, -1),
      "Escape": () => this.choose(one, null),
    };
    if (!deeds[event.key]) return false;
    deeds[event.key]();
    return true;
  }

  // The next group, in the order in which they were ready.
  step(one, by) {
    if (!one.groups.length) return;
    const now = one.chosen && one.chosen.group ? one.groups.indexOf(one.chosen.group) : by > 0 ? -1 : one.groups.length;
    const group = one.groups[Math.min(one.groups.length - 1, Math.max(0, now + by))];
    const width = this.view.to - this.view.from;
    if (group.sent < this.view.from || group.arrived > this.view.to) this.set((group.sent + group.arrived - width) / 2, (group.sent + group.arrived + width) / 2);
    const box = one.canvas.getBoundingClientRect(), at = one.place.engines[Math.max(0, group.engine)];
    this.choose(one, { group }, box.left + one.x(group.arrived), box.top + (at ? at.top + at.height : 0));
    R.by("said").textContent = one.describe({ group }).join("; ");
  }
};
