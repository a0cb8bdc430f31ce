"use strict";

// Pictures take their colours from the page, and again when it turns dark or light.
function theme() {
  const style = getComputedStyle(document.documentElement);
  const line = style.getPropertyValue("--line");
  const axis = { gridcolor: line, linecolor: line, zerolinecolor: line, automargin: true };
  return { font: { color: style.getPropertyValue("--text"), family: "system-ui, sans-serif", size: 12 }, axis };
}

function themed(layout) {
  const { font, axis } = theme();
  const axes = Object.keys(layout).filter((name) => /^[xy]axis/.test(name));
  const colored = Object.fromEntries(axes.map((name) => [name, Object.assign({}, layout[name], axis)]));
  return Object.assign({}, layout, colored, { font });
}

function figure(plot) {
  return JSON.parse(plot.parentElement.querySelector("script").textContent);
}

function draw(plot) {
  const { data, layout } = figure(plot);
  Plotly.react(plot, data, themed(layout), { displayModeBar: false, responsive: true });
}

// A page may hold hundreds of pictures: each is drawn when it comes near.
const near = new IntersectionObserver(
  (entries) => {
    for (const entry of entries.filter((entry) => entry.isIntersecting)) {
      near.unobserve(entry.target);
      draw(entry.target);
    }
  },
  { rootMargin: "600px" },
);
const plots = [...document.querySelectorAll(".plot")];
plots.forEach((plot) => near.observe(plot));

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  plots.filter((plot) => plot.classList.contains("js-plotly-plot")).forEach(draw);
});

addEventListener("beforeprint", () => plots.forEach(draw));

// A link from the table of comparisons opens what it points to.
function opened() {
  const target = location.hash && document.getElementById(location.hash.slice(1));
  if (target) target.open = true;
}
addEventListener("hashchange", opened);
opened();
