function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

function readData(id) {
  return JSON.parse(document.getElementById(id).textContent);
}

const packets = new Map();

async function unpack(name) {
  if (!packets.has(name)) {
    const packed = JSON.parse(document.querySelector(`[data-packet="${CSS.escape(name)}"]`).textContent);
    const bytes = Uint8Array.from(atob(packed), (sign) => sign.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
    packets.set(name, JSON.parse(await new Response(stream).text()));
  }
  return packets.get(name);
}

function currentGroup() {
  return document.getElementById("group").value;
}

function isDark() {
  const theme = document.documentElement.dataset.theme;
  return theme ? theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}

// Each group's parts are written once and moved to the places they belong to.
function placeSections() {
  for (const part of document.querySelectorAll("[data-part]")) document.getElementById(part.dataset.part).append(part);
}

function showGroup() {
  for (const part of document.querySelectorAll("[data-group]")) part.hidden = part.dataset.group !== currentGroup();
  const shown = document.querySelector('[data-part="differences"]:not([hidden])');
  document.querySelector("#differences .empty").hidden = shown !== null && shown.children.length > 0;
  document.dispatchEvent(new CustomEvent("groupchange"));
}

document.getElementById("theme").addEventListener("click", () => {
  document.documentElement.dataset.theme = isDark() ? "light" : "dark";
  document.dispatchEvent(new CustomEvent("themechange"));
});
document.getElementById("group").addEventListener("change", showGroup);
document.addEventListener("DOMContentLoaded", () => {
  placeSections();
  showGroup();
});
