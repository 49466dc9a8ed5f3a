// Scales, ticks and the shapes of series: what the charts are drawn with.

const WIDTH = 560;
const HEIGHT = 320;
const EDGE = { left: 58, right: 14, top: 10, bottom: 42 };
const DASHES = ["", "7 3", "2 3", "6 3 1 3"];
const NUM_LOOKS = 8;
const MARKS = [
  "M-4,0a4,4 0 1,0 8,0a4,4 0 1,0 -8,0Z",
  "M-3.6,-3.6h7.2v7.2h-7.2Z",
  "M0,-4.6L4.4,3.4H-4.4Z",
  "M0,-5L5,0L0,5L-5,0Z",
  "M0,4.6L4.4,-3.4H-4.4Z",
  "M-1.6,-4.6h3.2v3h3v3.2h-3v3h-3.2v-3h-3v-3.2h3Z",
  "M-4,-4L0,-1.6L4,-4L1.6,0L4,4L0,1.6L-4,4L-1.6,0Z",
  "M0,-5.4L1.5,-1.7L5.2,-1.7L2.3,.7L3.3,4.5L0,2.3L-3.3,4.5L-2.3,.7L-5.2,-1.7L-1.5,-1.7Z",
];

function lookOf(name, looks) {
  const index = looks[name];
  const isFull = name.split(" ")[0] === "full";
  return {
    colour: isFull ? "full" : `look${index % NUM_LOOKS}`,
    dash: isFull ? "6 4" : DASHES[(index + Math.floor(index / NUM_LOOKS)) % DASHES.length],
    mark: MARKS[index % NUM_LOOKS],
  };
}

function niceTicks(low, high, count) {
  const raw = (high - low || 1) / count;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].map((factor) => factor * power).find((size) => size >= raw);
  const ticks = [];
  for (let tick = Math.ceil(low / step) * step; tick <= high + step * 1e-6; tick += step) ticks.push(Number(tick.toPrecision(12)));
  return ticks;
}

function xScale(panel) {
  const all = panel.series.filter((s) => s.kind !== "reference").flatMap((s) => s.points.map((p) => p[0]));
  const values = all.length ? all : [0, 1];
  const bend = panel.logX && Math.min(...values) > 0 ? Math.log2 : (x) => x;
  const low = bend(Math.min(...values));
  const high = bend(Math.max(...values));
  const pad = (high - low) * 0.04 || 1;
  const span = high - low + 2 * pad;
  const inner = WIDTH - EDGE.left - EDGE.right;
  const ticks = panel.logX ? [...new Set(values)].sort((a, b) => a - b) : niceTicks(Math.min(...values), Math.max(...values), 6);
  return { at: (x) => EDGE.left + ((bend(x) - low + pad) / span) * inner, ticks };
}

function yScale(panel) {
  const values = panel.series.flatMap((s) => s.points.flatMap((p) => [p[1], p[2], p[3]])).filter((v) => v !== null);
  const low = Math.min(...values);
  const high = Math.max(...values);
  const pad = (high - low) * 0.08 || Math.abs(high) * 0.1 || 1;
  const bottom = low >= 0 ? Math.max(0, low - pad) : low - pad;
  const span = high + pad - bottom;
  const inner = HEIGHT - EDGE.top - EDGE.bottom;
  return { at: (y) => EDGE.top + (1 - (y - bottom) / span) * inner, ticks: niceTicks(bottom, high + pad, 5) };
}

function drawAxes(svg, panel, x, y) {
  const bottom = HEIGHT - EDGE.bottom;
  for (const tick of y.ticks) {
    const at = y.at(tick);
    svg.append(makeSvg("line", { class: "grid", x1: EDGE.left, x2: WIDTH - EDGE.right, y1: at, y2: at }));
    svg.append(makeSvg("text", { x: EDGE.left - 7, y: at + 4, "text-anchor": "end" }, format(tick)));
  }
  for (const tick of x.ticks) {
    svg.append(makeSvg("text", { x: x.at(tick), y: bottom + 17, "text-anchor": "middle" }, format(tick)));
  }
  const middle = (EDGE.top + bottom) / 2;
  svg.append(makeSvg("text", { class: "axis x", x: (EDGE.left + WIDTH) / 2, y: HEIGHT - 6, "text-anchor": "middle" }, panel.x));
  svg.append(makeSvg("text", { class: "axis y", x: 0, y: 0, "text-anchor": "middle", transform: `translate(13 ${middle}) rotate(-90)` }, panel.y));
}

function pathOf(points, x, y, isSteps) {
  return points
    .map(([px, py], index) => {
      const at = `${x.at(px).toFixed(1)},${y.at(py).toFixed(1)}`;
      return index === 0 ? `M${at}` : isSteps ? `H${x.at(px).toFixed(1)}V${y.at(py).toFixed(1)}` : `L${at}`;
    })
    .join("");
}
