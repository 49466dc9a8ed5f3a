// Charts: the same data that matplotlib draws for paper, with values on pointing and series to switch off.

const chartData = readData("chart-data");

function drawReference(layer, series, x, y, look) {
  const [, level, low, high] = series.points[0];
  const [left, right] = [EDGE.left, WIDTH - EDGE.right];
  if (low !== null) layer.append(makeSvg("rect", { class: "band", x: left, width: right - left, y: y.at(high), height: y.at(low) - y.at(high) }));
  layer.append(makeSvg("line", { class: "line", x1: left, x2: right, y1: y.at(level), y2: y.at(level), "stroke-dasharray": look.dash }));
}

function drawLine(layer, series, x, y, look) {
  const bounded = series.points.filter((p) => p[2] !== null);
  if (bounded.length === 1) {
    const [px, , low, high] = bounded[0];
    layer.append(makeSvg("line", { class: "whisker", x1: x.at(px), x2: x.at(px), y1: y.at(low), y2: y.at(high) }));
  } else if (bounded.length) {
    const upper = bounded.map((p) => [p[0], p[3]]);
    const lower = bounded.map((p) => [p[0], p[2]]).reverse();
    layer.append(makeSvg("path", { class: "band", d: `${pathOf(upper, x, y)}L${pathOf(lower, x, y).slice(1)}Z` }));
  }
  const isSteps = series.kind === "steps";
  layer.append(makeSvg("path", { class: isSteps ? "line steps" : "line", d: pathOf(series.points, x, y, isSteps), "stroke-dasharray": isSteps ? "" : look.dash }));
  if (isSteps) return;
  for (const [px, py] of series.points) {
    layer.append(makeSvg("path", { class: "mark", d: look.mark, transform: `translate(${x.at(px)} ${y.at(py)})` }));
  }
}

function targetsOf(panel, x, y, hidden) {
  return panel.series
    .filter((series) => !hidden.has(series.name))
    .flatMap((series) => series.points.map((point) => ({
      series, point, left: series.kind === "reference" ? WIDTH - EDGE.right - 40 : x.at(point[0]), top: y.at(point[1]),
    })));
}

function describe({ series, point: [px, py, low, high, label] }, panel) {
  const interval = low === null ? "" : `  [${format(low)}, ${format(high)}]`;
  const place = series.kind === "reference" ? "" : `\n${panel.x}: ${format(px)}`;
  return `${series.name}\n${panel.y}: ${format(py)}${interval}${place}${label ? `\n${label}` : ""}`;
}

function addReading(box, svg, panel, x, y, hidden) {
  const tip = make("div", { class: "tip", role: "status", hidden: "" });
  box.append(tip);
  let current = -1;
  const show = (target) => {
    tip.hidden = target === undefined;
    if (target === undefined) return;
    tip.textContent = describe(target, panel);
    tip.style.left = `${(100 * target.left) / WIDTH}%`;
    tip.style.top = `${(100 * target.top) / HEIGHT}%`;
  };
  svg.addEventListener("pointermove", (event) => {
    const frame = svg.getBoundingClientRect();
    const left = ((event.clientX - frame.left) / frame.width) * WIDTH;
    const top = ((event.clientY - frame.top) / frame.height) * HEIGHT;
    const away = (target) => Math.hypot(target.series.kind === "reference" ? 0 : target.left - left, target.top - top);
    show(targetsOf(panel, x, y, hidden).filter((t) => away(t) < 40).sort((a, b) => away(a) - away(b))[0]);
  });
  svg.addEventListener("pointerleave", () => show());
  svg.addEventListener("blur", () => show());
  svg.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    const targets = targetsOf(panel, x, y, hidden);
    if (!step || !targets.length) return;
    event.preventDefault();
    current = (current + step + targets.length) % targets.length;
    show(targets[current]);
  });
}

function drawPanel(box, chart, panel, hidden) {
  const x = xScale(panel);
  const y = yScale(panel);
  const svg = makeSvg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", tabindex: "0", "aria-label": `${chart.title}: ${panel.title}` });
  drawAxes(svg, panel, x, y);
  for (const series of panel.series) {
    const look = lookOf(series.name, chartData.looks);
    const layer = makeSvg("g", { class: `series ${look.colour}`, "data-series": series.name });
    (series.kind === "reference" ? drawReference : drawLine)(layer, series, x, y, look);
    layer.toggleAttribute("hidden", hidden.has(series.name));
    svg.append(layer);
  }
  box.replaceChildren(svg);
  addReading(box, svg, panel, x, y, hidden);
}

function legendButton(name, hidden, redraw) {
  const look = lookOf(name, chartData.looks);
  const line = makeSvg("line", { class: "line", x1: 1, x2: 33, y1: 6, y2: 6, "stroke-dasharray": look.dash });
  const mark = makeSvg("path", { class: "mark", d: look.mark, transform: "translate(17 6)" });
  const icon = makeSvg("svg", { viewBox: "0 0 34 12", class: look.colour, "aria-hidden": "true" }, line, mark);
  const button = make("button", { type: "button", "aria-pressed": "true" }, icon, name);
  button.addEventListener("click", () => {
    if (!hidden.delete(name)) hidden.add(name);
    button.setAttribute("aria-pressed", String(!hidden.has(name)));
    redraw();
  });
  return button;
}

function drawChart(chart) {
  const hidden = new Set();
  const box = make("div", { class: "chart" });
  const pick = make("select", { "aria-label": `Panel of ${chart.title}` }, ...chart.panels.map((p, i) => make("option", { value: i }, `${p.title}${p.y === "Score" ? "" : `: ${p.y}`}`)));
  const redraw = () => drawPanel(box, chart, chart.panels[pick.value], hidden);
  pick.addEventListener("change", redraw);
  const names = [...new Set(chart.panels.flatMap((p) => p.series.map((s) => s.name)))];
  const legend = make("div", { class: "legend", role: "group", "aria-label": "Series" }, ...names.map((name) => legendButton(name, hidden, redraw)));
  const figure = make("figure", { id: `chart-${chart.name}` }, make("h3", {}, chart.title));
  if (chart.panels.length > 1) figure.append(make("div", { class: "tools" }, pick));
  figure.append(box, legend, make("figcaption", {}, chart.caption));
  redraw();
  return figure;
}

function showCharts() {
  const groups = [...document.getElementById("group").options].map((option) => option.value);
  const belongs = (chart) => !groups.some((name) => chart.name.endsWith(`-${name}`)) || chart.name.endsWith(`-${currentGroup()}`);
  document.getElementById("charts").replaceChildren(...chartData.charts.filter(belongs).map(drawChart));
}

document.addEventListener("groupchange", showCharts);
