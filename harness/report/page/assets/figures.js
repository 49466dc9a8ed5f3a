// Figures: the declarations that are drawn for paper, laid out for this screen; values by pointer and by keyboard.

const figureIndex = readData("figure-index");
const looks = readData("looks");
const MANY_PANELS = 4;
const MANY_NAMES = 16; // whose legend would fill a narrow screen; pointing at a mark tells its name
const NARROW = 560;
const ALL = "all";
const ERRORS_ONLY = 1;

function themed(spec) {
  let text = JSON.stringify(spec);
  if (isDark()) for (const [light, dark] of Object.entries(looks.dark)) text = text.replaceAll(`"${light}"`, `"${dark}"`);
  return JSON.parse(text);
}

function pageConfig(names, width) {
  const longest = Math.max(...names.map((name) => String(name ?? "").length));
  const isNarrow = width < NARROW;
  const style = getComputedStyle(document.documentElement);
  const [ink, soft, rule] = ["--ink", "--soft", "--rule"].map((name) => style.getPropertyValue(name).trim());
  const text = { labelColor: soft, titleColor: ink };
  return {
    ...looks.config,
    background: null,
    font: "system-ui, sans-serif",
    axis: { ...looks.config.axis, ...text, gridColor: rule, domainColor: soft, tickColor: soft, labelFontSize: 11, titleFontSize: 12 },
    legend: { ...looks.config.legend, ...text, columns: Math.max(1, Math.floor(width / (longest * 6 + 35))), labelFontSize: 11, disable: isNarrow && names.length > MANY_NAMES },
    title: { color: ink, fontSize: 12, fontWeight: "normal" },
    header: { ...looks.config.header, ...text, labelColor: ink, labelFontSize: 12 },
    rule: { color: ink },
  };
}

// The legend names what is shown; colours and shapes stay those of the whole figure.
function nameOnly(unit, names) {
  for (const { encoding } of unit.layer) {
    for (const channel of ["color", "shape", "strokeDash"]) {
      if (encoding?.[channel]?.field === "series" && encoding[channel].legend) encoding[channel].legend.values = names;
    }
  }
}

function layOut(figure, rows, panels, width) {
  const names = [...new Set(rows.map((row) => row.series).filter((name) => name !== undefined))];
  const spec = { data: { values: rows }, params: [{ name: "at", value: -1 }], config: pageConfig(names, width) };
  const unit = structuredClone(figure.unit);
  nameOnly(unit, names);
  if (figure.panels.length === 1) {
    const title = panels[0] ? { title: panels[0] } : {};
    // Names of bars take what they need; elsewhere the axis is narrow, and Vega does not fit an axis of steps.
    if (unit.height?.step) {
      const height = unit.height.step * names.length;
      return { ...spec, ...unit, ...title, width: Math.floor(width), height, autosize: { type: "fit-x", contains: "padding" } };
    }
    const height = unit.height ?? Math.min(320, Math.max(190, width * 0.55));
    return { ...spec, ...unit, ...title, width: unit.width ?? Math.floor(width) - 75, height };
  }
  const size = unit.width ?? 250;
  const columns = Math.max(1, Math.min(panels.length, MANY_PANELS, Math.floor(width / (size + 70))));
  if (!unit.width) unit.width = Math.floor(width / columns) - 75;
  if (!unit.height) unit.height = panels.length === 1 ? Math.min(280, width * 0.6) : 190;
  const scale = Object.fromEntries(["x", "y", "xOffset"].map((name) => [name, figure.shared.includes(name) ? "shared" : "independent"]));
  const facet = { field: "panel", type: "nominal", sort: panels, title: null };
  return { ...spec, facet, columns, spec: unit, resolve: { scale } };
}

function rowsOf(figure) {
  return figure.rows.map((cells, id) => ({ id, ...Object.fromEntries(figure.keys.map((key, n) => [key, cells[n]])) }));
}

async function draw(box) {
  const { state } = box;
  const figure = state.figure ?? (state.figure = await unpack(`figure/${state.entry.name}`));
  if (!state.rows) setUp(box);
  const panels = state.panel === ALL ? figure.panels : [state.panel];
  const shown = state.rows.filter((row) => panels.includes(row.panel ?? "") && !state.hidden.has(row.series));
  state.shown = shown;
  state.view?.finalize();
  if (!shown.length) return state.place.replaceChildren();
  const spec = themed(layOut(figure, shown, panels, state.place.clientWidth));
  // Vega warns of every optional mark (an interval, a level) that a panel has none of; mistakes still throw.
  const options = { logLevel: ERRORS_ONLY, actions: false, renderer: "svg", mode: "vega-lite", tooltip: { theme: isDark() ? "dark" : "light" } };
  const result = await vegaEmbed(state.place, spec, options);
  state.view = result.view;
}

// What can be chosen is known only when the figure is unpacked.
function setUp(box) {
  const { state } = box;
  const { panels } = state.figure;
  state.rows = rowsOf(state.figure);
  const isNarrow = state.place.clientWidth < NARROW;
  state.panel = panels.length > 1 && (isNarrow || panels.length > MANY_PANELS) && !state.figure.unit.width ? panels[0] : ALL;
  if (panels.length > 1) {
    const options = [ALL, ...panels].map((name) => make("option", { value: name }, name === ALL ? `All ${panels.length}` : name));
    const pick = make("select", { "aria-label": `Panel of ${state.entry.title}` }, ...options);
    pick.value = state.panel;
    pick.addEventListener("change", () => {
      state.panel = pick.value;
      draw(box);
    });
    state.tools.append(pick);
  }
  const names = [...new Set(state.rows.map((row) => row.series).filter((name) => name !== undefined))];
  if (names.length > 1) state.tools.append(seriesChoice(box, names));
}

function seriesChoice(box, names) {
  const { state } = box;
  const labels = names.map((name) => {
    const input = make("input", { type: "checkbox", checked: "" });
    input.addEventListener("change", () => {
      if (!state.hidden.delete(name)) state.hidden.add(name);
      draw(box);
    });
    return make("label", {}, input, ` ${name}`);
  });
  return make("details", { class: "series" }, make("summary", {}, "Series"), make("div", {}, ...labels));
}

function step(box, event) {
  const { state } = box;
  const move = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
  if (!move || !state.shown?.length) return;
  event.preventDefault();
  const last = state.shown.length - 1;
  state.at = state.at === undefined ? (move > 0 ? 0 : last) : (state.at + move + last + 1) % (last + 1);
  const row = state.shown[Math.min(state.at, last)];
  state.output.textContent = row.panel && state.panel === ALL ? `${row.panel}. ${row.tip}` : row.tip;
  state.view?.signal("at", row.id).run();
}

const seen = new IntersectionObserver((entries) => {
  for (const { isIntersecting, target } of entries) {
    if (!isIntersecting) continue;
    seen.unobserve(target);
    target.closest("figure").drawn = draw(target.closest("figure"));
  }
}, { rootMargin: "300px" });

function figureBox(entry) {
  const place = make("div", { class: "plot", tabindex: "0", role: "group", "aria-label": `${entry.title}. Arrow keys read its values.` });
  const tools = make("div", { class: "tools" });
  const output = make("output", { class: "reading" });
  const box = make("figure", { class: "chart", id: `chart-${entry.name}` }, make("h3", {}, entry.title), tools, place, output, make("figcaption", {}, entry.caption));
  box.state = { entry, place, tools, output, hidden: new Set() };
  place.addEventListener("keydown", (event) => step(box, event));
  seen.observe(place);
  return box;
}

function showFigures() {
  const shown = figureIndex.filter((entry) => !entry.group || entry.group === currentGroup());
  const isFirst = (entry) => entry.name === `answer-${currentGroup()}`;
  document.getElementById("picture").replaceChildren(...shown.filter(isFirst).map(figureBox));
  document.getElementById("charts").replaceChildren(...shown.filter((entry) => !isFirst(entry)).map(figureBox));
}

function redraw() {
  for (const box of document.querySelectorAll("figure.chart")) if (box.state.rows) draw(box);
}

let lastWidth = innerWidth;
addEventListener("resize", () => {
  if (innerWidth === lastWidth) return;
  lastWidth = innerWidth;
  redraw();
});
document.addEventListener("groupchange", showFigures);
document.addEventListener("themechange", redraw);
