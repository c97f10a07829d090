"use strict";
// Every metric of one run, with a search by name.

View.pages.metrics = {
  title: "Metrics",
  async show(main, state) {
    let metrics = await View.metrics(state.run);
    const axis = View.axes[state.x] ? state.x : "steps";
    const names = Object.keys(metrics.columns).sort();
    const traces = (name) => View.curve(metrics, View.xOf(metrics, axis), name, { scale: View.scaleOf(name) });
    const cards = names.map((name) => View.chart({ title: name, note: (View.metricOf(name) || {}).meaning, traces: () => traces(name),
      layout: () => ({ legend: false, x: View.xAxis(axis, View.xOf(metrics, axis)), y: { title: View.unitOf(name), fromZero: false } }) }));
    const count = View.h("span", { class: "note", role: "status" });
    const filter = (text) => {
      const words = text.split(/\s+/);
      cards.forEach((card, i) => { card.hidden = !words.every((word) => names[i].toLowerCase().includes(word)); });
      count.textContent = `${View.count(cards.filter((card) => !card.hidden).length)} of ${View.count(cards.length)} metrics`;
    };
    const search = View.searchBox("f-find", "Name contains", state.find, (find) => { history.replaceState(null, "", View.address({ find })); filter(find); });
    main.replaceChildren(
      View.h("div", { class: "head-row" }, View.h("h1", {}, "Metrics"), View.choices("Over", Object.keys(View.axes).map((a) => [a, a]), axis, (x) => View.go({ x }))),
      View.h("div", { class: "filters" }, search, count),
      names.length ? View.h("div", { class: "grid three" }, cards) : View.empty(View.missing(metrics, "This run has logged no metrics.")));
    filter((state.find || "").toLowerCase());
    const draw = () => cards.forEach((card, i) => card.update({ traces: () => traces(names[i]), empty: traces(names[i]).length ? null : "No finite value so far." }));
    return { redraw: draw, async follow() { metrics = await View.metrics(state.run); if (Object.keys(metrics.columns).length > names.length) View.show(); else draw(); } };
  },
};
