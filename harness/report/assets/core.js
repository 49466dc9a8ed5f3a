const SVG = "http://www.w3.org/2000/svg";

function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  fill(element, attributes, children);
  return element;
}

function makeSvg(tag, attributes = {}, ...children) {
  const element = document.createElementNS(SVG, tag);
  fill(element, attributes, children);
  return element;
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
}

function readData(id) {
  return JSON.parse(document.getElementById(id).textContent);
}

function format(value) {
  if (value === null) return "-";
  const digits = Math.abs(value) >= 1000 || Number.isInteger(value) ? 0 : Math.abs(value) >= 10 ? 1 : Math.abs(value) >= 1 ? 2 : 3;
  return value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
}

function currentGroup() {
  return document.getElementById("group").value;
}

// Each group's tables are written once and moved under the headings they belong to.
function placeSections() {
  const places = { about: "about", accuracy: "accuracy", differences: "differences", memory: "costs", speed: "costs" };
  for (const part of document.querySelectorAll("[data-part]")) {
    document.getElementById(places[part.dataset.part]).append(part);
  }
}

function showGroup() {
  for (const part of document.querySelectorAll("[data-group]")) part.hidden = part.dataset.group !== currentGroup();
  const shown = document.querySelector('[data-part="differences"]:not([hidden])');
  document.querySelector("#differences .empty").hidden = shown !== null && shown.children.length > 0;
  document.dispatchEvent(new CustomEvent("groupchange"));
}

function nextTheme() {
  const root = document.documentElement;
  const isDark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = isDark ? "light" : "dark";
}

document.getElementById("theme").addEventListener("click", nextTheme);
document.getElementById("group").addEventListener("change", showGroup);
document.addEventListener("DOMContentLoaded", () => {
  placeSections();
  showGroup();
});
