// Single samples: a list with the score in every run; the rest is unpacked when a sample is opened.

const sampleData = readData("sample-data");
const PHASES = { prefill_end: "after the prompt", end: "after the answer" };
const DARK = [0, 34, 78];
const BRIGHT = [254, 232, 56];

function format(value) {
  return value.toLocaleString("en", { maximumFractionDigits: value < 10 ? 2 : 1 });
}

function drawMap(map) {
  const canvas = make("canvas", { width: map.rows[0].length, height: map.rows.length, role: "img" });
  canvas.setAttribute("aria-label", `Retention map: ${map.rows.length} layers, ${map.tokens} positions`);
  const context = canvas.getContext("2d");
  const image = context.createImageData(canvas.width, canvas.height);
  map.rows.forEach((row, layer) => {
    [...row].forEach((digit, bin) => {
      const share = parseInt(digit, 16) / 15;
      const at = 4 * ((map.rows.length - 1 - layer) * canvas.width + bin);
      DARK.forEach((dark, channel) => { image.data[at + channel] = dark + share * (BRIGHT[channel] - dark); });
      image.data[at + 3] = 255;
    });
  });
  context.putImageData(image, 0, 0);
  return canvas;
}

function promptBox(prompt, why) {
  if (!prompt) return make("p", { class: "prompt" }, `The prompt is not here. ${why}`);
  const text = make("pre", {}, prompt.head);
  if (prompt.cut) text.append(make("span", { class: "cut" }, `… ${prompt.cut.toLocaleString("en")} characters left out …`), prompt.tail);
  const start = prompt.question || prompt.head.slice(0, 200);
  const box = make("div", { class: "prompt" }, make("div", { class: "label" }, "Question"), make("pre", { class: "question" }, start));
  box.append(make("details", {}, make("summary", {}, "Whole prompt"), text));
  return box;
}

function runCard(run, answer, maps) {
  const card = make("article", { class: "card" }, make("h4", {}, run.label, make("span", {}, answer.score.toFixed(1))));
  card.append(make("pre", { tabindex: "0" }, answer.text || "(empty)"));
  const seconds = answer.e2e === null ? "" : `, ${format(answer.e2e)} s`;
  card.append(make("p", {}, `${answer.tokens} tokens, ended by ${answer.finish}${seconds}`));
  card.append(make("p", {}, `${answer.evictions} ${answer.evictions === 1 ? "eviction" : "evictions"}, ${answer.evicted.toLocaleString("en")} tokens a layer; resident: peak ${answer.peak.toLocaleString("en")}, end ${answer.final.toLocaleString("en")}`));
  for (const [phase, map] of Object.entries(maps || {})) {
    card.append(make("p", {}, `Kept ${PHASES[phase]}: layer 0 below, position 0 to ${map.tokens.toLocaleString("en")}`), drawMap(map));
  }
  return card;
}

async function showSample(place, group, task, sampleId) {
  const detail = (await unpack(`${group}/${task}`))[sampleId];
  const runs = sampleData[group].runs;
  const heading = make("h3", { tabindex: "-1" }, sampleId);
  const facts = `${detail.promptTokens.toLocaleString("en")} prompt tokens${detail.truncated ? ", the middle was cut out" : ""}`;
  const answers = make("div", { class: "answers" }, make("div", { class: "label" }, "Reference"), make("pre", {}, detail.answers.join("\n— or —\n")));
  const cards = Object.entries(detail.runs).map(([index, answer]) => runCard(runs[index], answer, detail.maps[index]));
  place.replaceChildren(heading, make("p", { class: "hint" }, facts), promptBox(detail.prompt, sampleData[group].missingPrompts), answers, make("div", { class: "cards" }, ...cards));
  heading.focus({ preventScroll: true });
}

function sampleRow(group, task, [sampleId, scores], place) {
  const button = make("button", { type: "button" }, sampleId);
  const row = make("tr", {}, make("th", { scope: "row" }, button));
  for (const score of scores) row.append(make("td", score === null ? {} : { "data-v": score }, score === null ? "-" : score.toFixed(1)));
  button.addEventListener("click", () => {
    for (const other of row.parentElement.rows) other.setAttribute("aria-selected", String(other === row));
    showSample(place, group, task, sampleId);
  });
  return row;
}

function sampleTable(group, data, place) {
  const columns = ["Sample", ...data.runs.map((run) => run.label)];
  const head = make("tr", {}, ...columns.map((title, index) => make("th", { scope: "col", class: index ? "number" : "text key" }, make("span", {}, title))));
  const rows = Object.entries(data.tasks).flatMap(([task, samples]) => samples.map((sample) => sampleRow(group, task, sample, place)));
  return make("table", {}, make("thead", {}, head), make("tbody", {}, ...rows));
}

function showSamples() {
  const group = currentGroup();
  const data = sampleData[group];
  if (!data) return;
  if (!Object.keys(data.tasks).length) {
    document.getElementById("sample-browser").replaceChildren(make("p", { class: "empty" }, "No samples are on this page."));
    return;
  }
  const place = make("div", { class: "detail", "aria-live": "polite" });
  const table = sampleTable(group, data, place);
  const shown = table.tBodies[0].rows.length;
  const figure = make("figure", { class: "table", id: `samples-${group}` }, make("h3", {}, "Scores of single samples"));
  figure.append(make("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Scores of single samples" }, table));
  const maps = data.mapsPerTask ? ` Maps: of ${data.mapsPerTask} samples a task.` : "";
  const note = data.missingPrompts ? ` ${data.missingPrompts}` : "";
  figure.append(make("figcaption", {}, `${shown} of ${data.numSamples} samples, the first of each task; all are in the run folders. Open one to see prompt, answers and what was kept.${maps}${note}`));
  document.getElementById("sample-browser").replaceChildren(figure, place);
  addSorting(table);
  addTools(figure, table);
  addTints(table);
}

document.addEventListener("groupchange", showSamples);
