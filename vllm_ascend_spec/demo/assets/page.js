"use strict";

const root = document.documentElement;
const config = { responsive: true, displayModeBar: false };

function colour(name) {
  return getComputedStyle(root).getPropertyValue(name).trim();
}

// Axes and fonts follow the theme; the colours of the data are the same in both.
function themed(layout) {
  const axis = {
    gridcolor: colour("--grid"),
    zerolinecolor: colour("--grid"),
    linecolor: colour("--line"),
    automargin: true,
  };
  const result = {
    ...layout,
    template: null,
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: "system-ui, sans-serif", size: 13, color: colour("--text") },
    margin: { l: 56, r: 16, t: 40, b: layout.showlegend === false ? 46 : 104 },
    legend: { orientation: "h", yref: "container", y: 0, yanchor: "bottom", x: 0, font: { color: colour("--text") } },
    hoverlabel: { bgcolor: colour("--card"), bordercolor: colour("--line"), font: { color: colour("--text") } },
  };
  for (const key of Object.keys(layout)) {
    if (/^[xy]axis\d*$/.test(key)) result[key] = { ...layout[key], ...axis };
  }
  return result;
}

function draw() {
  for (const element of document.querySelectorAll(".plot")) {
    const source = document.getElementById(`figure-${element.dataset.figure}`);
    const figure = JSON.parse(source.textContent);
    Plotly.react(element, figure.data, themed(figure.layout), config);
  }
}

function setTheme(theme) {
  root.dataset.theme = theme;
  draw();
}

function show(index) {
  for (const element of document.querySelectorAll(".prompt")) {
    element.hidden = element.dataset.prompt !== index;
  }
  for (const button of document.querySelectorAll(".pills button")) {
    button.setAttribute("aria-selected", String(button.dataset.prompt === index));
  }
}

const dark = window.matchMedia("(prefers-color-scheme: dark)");
dark.addEventListener("change", () => setTheme(dark.matches ? "dark" : "light"));
document.getElementById("theme").addEventListener("click", () => {
  setTheme(root.dataset.theme === "dark" ? "light" : "dark");
});
for (const button of document.querySelectorAll(".pills button")) {
  button.addEventListener("click", () => show(button.dataset.prompt));
}
const rejected = document.getElementById("rejected");
if (rejected) {
  rejected.addEventListener("change", () => document.body.classList.toggle("show-rejected", rejected.checked));
  show("0");
}
setTheme(dark.matches ? "dark" : "light");
