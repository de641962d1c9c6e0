"use strict";
// Without this the page reads the same: both charts show, and every point has its text as a title.
for (const board of document.querySelectorAll("[data-charts]")) {
  const charts = [...board.querySelectorAll("[data-chart]")];
  const readout = board.querySelector("[data-readout]");
  const hint = "Point at a mark, or use the arrow keys on one, to read its figures.";
  readout.hidden = false;
  readout.textContent = hint;

  const show = (point) => {
    for (const other of board.querySelectorAll(".point.current")) other.classList.remove("current");
    if (point) point.classList.add("current");
    readout.textContent = point ? point.dataset.text : hint;
  };

  for (const chart of charts) {
    const points = [...chart.querySelectorAll(".point")];
    // One stop for the tab key in a chart; the arrow keys move along cost.
    const order = points.slice().sort(
      (a, b) => a.querySelector(".hit").cx.baseVal.value - b.querySelector(".hit").cx.baseVal.value);
    const first = order.find((point) => point.classList.contains("chosen")) || order[0];
    for (const point of points) {
      point.querySelector("title").remove();
      point.tabIndex = point === first ? 0 : -1;
      point.addEventListener("mouseenter", () => show(point));
      point.addEventListener("focus", () => show(point));
      point.addEventListener("click", () => point.focus());
      point.addEventListener("keydown", (event) => {
        const place = order.indexOf(point);
        const next = {
          ArrowRight: place + 1, ArrowUp: place + 1, ArrowLeft: place - 1, ArrowDown: place - 1,
          Home: 0, End: order.length - 1,
        }[event.key];
        if (next === undefined || !order[next]) return;
        event.preventDefault();
        point.tabIndex = -1;
        order[next].tabIndex = 0;
        order[next].focus();
      });
    }
  }

  const tabs = document.createElement("div");
  tabs.className = "tabs";
  tabs.setAttribute("role", "group");
  tabs.setAttribute("aria-label", "Which latency the chart shows");
  const select = (chosen) => {
    charts.forEach((chart, place) => {
      chart.hidden = chart !== chosen;
      tabs.children[place].setAttribute("aria-pressed", String(chart === chosen));
    });
    show(null);
  };
  for (const chart of charts) {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = chart.dataset.chart;
    button.addEventListener("click", () => select(chart));
    tabs.append(button);
  }
  board.prepend(tabs);
  if (charts.length) select(charts[0]);

  let alone = null;
  for (const item of board.querySelectorAll("[data-legend]")) {
    const button = document.createElement("button");
    button.type = "button";
    button.setAttribute("aria-pressed", "false");
    button.append(...item.childNodes);
    item.append(button);
    button.addEventListener("click", () => {
      alone = alone === item.dataset.legend ? null : item.dataset.legend;
      for (const series of board.querySelectorAll("[data-series]")) {
        series.classList.toggle("dimmed", alone !== null && series.dataset.series !== alone);
      }
      for (const other of board.querySelectorAll("[data-legend]")) {
        const pressed = other.dataset.legend === alone;
        other.querySelector("button").setAttribute("aria-pressed", String(pressed));
      }
    });
  }
}
