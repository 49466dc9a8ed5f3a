// Sorting, filtering, shading and saving of every table of the page.

function cellValue(row, index) {
  const cell = row.cells[index];
  return cell.dataset.v === undefined ? cell.textContent.trim() : Number(cell.dataset.v);
}

function isMissing(value) {
  return value === "-" || value === "" || value === "not measured";
}

// Missing values stay at the end in both directions.
function compareCells(a, b, direction) {
  if (isMissing(a) || isMissing(b)) return isMissing(a) - isMissing(b);
  if (typeof a === "number" && typeof b === "number") return direction * (a - b);
  return direction * String(a).localeCompare(String(b), "en", { numeric: true });
}

function sortTable(table, index, header) {
  const isAscending = header.getAttribute("aria-sort") !== "ascending";
  for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
  header.setAttribute("aria-sort", isAscending ? "ascending" : "descending");
  const body = table.tBodies[0];
  const rows = [...body.rows];
  rows.sort((a, b) => compareCells(cellValue(a, index), cellValue(b, index), isAscending ? 1 : -1));
  body.append(...rows);
}

function addSorting(table) {
  [...table.tHead.rows[0].cells].forEach((header, index) => {
    const button = make("button", { type: "button", title: "Sort" }, ...header.childNodes);
    header.append(button);
    button.addEventListener("click", () => sortTable(table, index, header));
  });
}

// A row is shown if it holds every word.
function filterTable(table, text, output) {
  const words = text.toLowerCase().split(/\s+/).filter(Boolean);
  const rows = [...table.tBodies[0].rows];
  for (const row of rows) {
    const content = [...row.cells].map((cell) => cell.textContent).join(" ").toLowerCase();
    row.hidden = !words.every((word) => content.includes(word));
  }
  const shown = rows.filter((row) => !row.hidden).length;
  output.textContent = words.length ? `${shown} of ${rows.length} rows` : "";
}

function quoted(cell) {
  return `"${cell.textContent.trim().replaceAll('"', '""')}"`;
}

function saveTable(table, name) {
  const rows = [...table.rows].filter((row) => !row.hidden);
  const text = rows.map((row) => [...row.cells].map(quoted).join(",")).join("\n");
  const link = make("a", { download: `${name}.csv`, href: URL.createObjectURL(new Blob([text], { type: "text/csv" })) });
  link.click();
  URL.revokeObjectURL(link.href);
}

function addTools(figure, table) {
  const title = figure.querySelector("h3").textContent;
  const input = make("input", { type: "search", placeholder: "Filter rows", "aria-label": `Filter rows of ${title}` });
  const output = make("output");
  const save = make("button", { type: "button", "aria-label": `Save ${title} as CSV` }, "CSV");
  input.addEventListener("input", () => filterTable(table, input.value, output));
  save.addEventListener("click", () => saveTable(table, figure.id));
  figure.querySelector(".scroll").before(make("div", { class: "tools" }, input, save, output));
}

// Says how many columns lie beyond the right edge, and shades that edge.
function addClipping(figure, table) {
  const scroll = figure.querySelector(".scroll");
  const hint = make("p", { class: "clip", "aria-hidden": "true" });
  scroll.after(hint);
  const update = () => {
    const edge = scroll.getBoundingClientRect().right;
    const beyond = [...table.tHead.rows[0].cells].filter((cell) => cell.getBoundingClientRect().right > edge + 4).length;
    scroll.classList.toggle("more", beyond > 0);
    hint.textContent = beyond ? `${beyond} more ${beyond === 1 ? "column" : "columns"} →` : "";
  };
  scroll.addEventListener("scroll", update, { passive: true });
  new ResizeObserver(update).observe(scroll);
}

function addTints(table) {
  const rows = [...table.tBodies[0].rows];
  for (let index = 0; index < rows[0].cells.length; index += 1) {
    const isKey = table.tHead.rows[0].cells[index].classList.contains("key");
    const cells = rows.map((row) => row.cells[index]).filter((cell) => cell.dataset.v !== undefined);
    const values = cells.map((cell) => Number(cell.dataset.v));
    const low = Math.min(...values);
    const span = Math.max(...values) - low;
    if (isKey || cells.length < 2 || span === 0) continue;
    cells.forEach((cell, place) => cell.style.setProperty("--t", ((values[place] - low) / span).toFixed(2)));
  }
}

for (const figure of document.querySelectorAll("figure.table")) {
  const table = figure.querySelector("table");
  addSorting(table);
  addClipping(figure, table);
  if (table.tBodies[0].rows.length > 1) addTools(figure, table);
  if (table.dataset.tints !== undefined && table.tBodies[0].rows.length) addTints(table);
}
