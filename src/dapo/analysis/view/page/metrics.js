"use strict";
// Every metric of one run in folded sections, with a search by name, and the charts that the reader has pinned.

const SECTIONS = ["pinned", "eval", "reward", "rollout", "loss", "critic", "optim", "time", "audit"];
const OPEN_AT_FIRST = ["pinned", "reward"];
const sectionOf = (name) => (name.includes("/") ? name.split("/")[0] : "other");
const bySection = (a, b) => { const place = (s) => (SECTIONS.includes(s) ? SECTIONS.indexOf(s) : SECTIONS.length); return place(a) - place(b) || (a < b ? -1 : 1); };

// The ends of an interval belong to the chart of its metric.
const intervalOf = (columns, name) => {
  const [low, high] = name.endsWith("/accuracy") ? ["low", "high"].map((end) => name.replace(/accuracy$/, end)) : [`${name}_low`, `${name}_high`];
  return columns[low] && columns[high] ? { low, high } : null;
};
const metricCurves = (metrics, name, axis) => {
  const x = View.xOf(metrics, axis), interval = intervalOf(metrics.columns, name), scale = View.scaleOf(name, [metrics]);
  return View.curve(metrics, x, name, interval ? { scale, ends: interval } : { scale });
};

// A section that opens by a click; what is folded is neither laid out nor drawn.
const foldedSection = (name, cards, isOpen, onToggle) => {
  const body = View.h("div", { class: "grid three" }, cards), title = View.h("span", { class: "soft" });
  const section = View.h("details", { class: "section", "data-section": name, open: isOpen, ontoggle: () => { body.hidden = !section.open; if (!section.isFiltered) onToggle(section.open); } },
    View.h("summary", {}, View.h("b", {}, name), title), body);
  body.hidden = !isOpen;
  section.setOpen = (open) => { section.isFiltered = true; section.open = open; body.hidden = !open; setTimeout(() => { section.isFiltered = false; }); };
  section.count = (names) => { title.textContent = ` ${View.plural(names.length, "chart")}: ${names.map((n) => n.slice(n.indexOf("/") + 1)).join(", ")}`; };
  return section;
};

View.pages.metrics = {
  title: "Metrics",
  async show(main, state) {
    let metrics = await View.metrics(state.run);
    const axis = View.axes[state.x] ? state.x : "steps", columns = Object.keys(metrics.columns).filter((name) => name !== "step");
    const ends = new Set(columns.map((name) => intervalOf(metrics.columns, name)).filter(Boolean).flatMap(({ low, high }) => [low, high]));
    const names = columns.filter((name) => !ends.has(name)).sort();
    const pins = new Set(View.stored.get("pins") || []), opened = new Set(View.stored.get("open") || OPEN_AT_FIRST);
    const pin = (name) => {
      if (pins.has(name)) pins.delete(name); else pins.add(name);
      View.stored.set("pins", [...pins]);
      View.show();
    };
    const traces = (name) => metricCurves(metrics, name, axis);
    const cardOf = (name) => {
      const card = View.chart({ title: name, note: (View.metricOf(name) || {}).meaning, traces: () => traces(name),
        layout: () => ({ legend: false, x: View.xAxis(axis, View.xOf(metrics, axis)), y: { title: View.unitOf(name, [metrics]), fromZero: false, limit: View.limitOf(name, [metrics]) }, marks: View.marks(metrics, axis) }) });
      const isPinned = pins.has(name);
      card.append(View.h("button", { type: "button", class: "pin", id: `pin-${name}`, "aria-pressed": String(isPinned), title: isPinned ? "Back to its section" : "Keep at the top of this page", "aria-label": `pin ${name}`, onclick: () => pin(name) }, isPinned ? "★" : "☆"));
      return card;
    };
    const cards = names.map(cardOf);
    const groups = new Map();
    names.forEach((name, i) => { const section = pins.has(name) ? "pinned" : sectionOf(name); groups.set(section, [...(groups.get(section) || []), i]); });
    const toggled = (name) => (open) => { if (open) opened.add(name); else opened.delete(name); View.stored.set("open", [...opened]); };
    const sections = [...groups.keys()].sort(bySection).map((name) => ({ name, rows: groups.get(name), element: foldedSection(name, groups.get(name).map((i) => cards[i]), opened.has(name), toggled(name)) }));
    const count = View.h("span", { class: "note", role: "status" });
    const filter = (text) => {
      const words = text.split(/\s+/);
      const isFound = (name) => { const { low, high } = intervalOf(metrics.columns, name) || {}; return [name, low, high].some((n) => n && words.every((word) => n.toLowerCase().includes(word))); };
      cards.forEach((card, i) => { card.hidden = !isFound(names[i]); });
      for (const { name, rows, element } of sections) {
        const shown = rows.filter((i) => !cards[i].hidden);
        element.hidden = !shown.length;
        element.count(shown.map((i) => names[i]));
        const open = text ? true : opened.has(name);
        if (element.open !== open) element.setOpen(open);
      }
      count.textContent = `${View.count(cards.filter((card) => !card.hidden).length)} of ${View.plural(cards.length, "chart")}`;
    };
    const search = View.searchBox("f-find", "Name contains", state.find, (find) => { history.replaceState(null, "", View.address({ find })); filter(find); });
    const all = (open) => { for (const { name } of sections) toggled(name)(open); for (const { element } of sections) element.setOpen(open); };
    main.replaceChildren(
      View.h("div", { class: "head-row" }, View.h("h1", {}, "Metrics"), View.choices("Over", Object.keys(View.axes).map((a) => [a, a]), axis, (x) => View.go({ x }))),
      View.h("div", { class: "filters" }, search, count, View.h("span", { class: "choices" }, View.h("button", { type: "button", id: "open-all", onclick: () => all(true) }, "open all"), View.h("button", { type: "button", id: "close-all", onclick: () => all(false) }, "close all")),
        View.h("span", { class: "note" }, "☆ keeps a chart at the top")),
      names.length ? View.h("div", { class: "sections" }, sections.map(({ element }) => element)) : View.empty(View.missing(metrics, "This run has logged no metrics.")));
    filter((state.find || "").toLowerCase());
    const draw = () => cards.forEach((card, i) => card.update({ traces: () => traces(names[i]), empty: traces(names[i]).length ? null : "No finite value so far." }));
    return { redraw: draw, async follow() { metrics = await View.metrics(state.run); if (Object.keys(metrics.columns).filter((name) => name !== "step").length > columns.length) View.show(); else draw(); } };
  },
};
