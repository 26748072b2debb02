// Lets names in tables break, and stacks the rows of a table that does not fit.
"use strict";

function letBreak(code) {
  const walker = document.createTreeWalker(code, NodeFilter.SHOW_TEXT);
  const texts = [];
  while (walker.nextNode()) texts.push(walker.currentNode);
  for (const text of texts) {
    const parts = text.data.split(/(?<=[._/=,:])(?=\w)/);
    if (parts.length > 1) {
      text.replaceWith(...parts.flatMap(
        (part, i) => i ? [document.createElement("wbr"), part] : [part]));
    }
  }
}

function prepare(table) {
  const names = [...table.querySelectorAll("thead th")]
    .map((cell) => cell.textContent.trim());
  for (const row of table.querySelectorAll("tbody tr")) {
    [...row.children].forEach((cell, i) => {
      if (names[i]) cell.dataset.column = names[i];
      cell.classList.toggle("blank", !cell.textContent.trim());
    });
  }
  table.querySelectorAll("td code").forEach(letBreak);
}

// On a phone three columns of sentences become columns of words.
function squeezed(table) {
  if (window.innerWidth > 736 || table.rows[0].cells.length < 3) return false;
  const line = parseFloat(getComputedStyle(table).lineHeight) || 24;
  return [...table.querySelectorAll("td > p")]
    .some((text) => text.offsetHeight > 6.5 * line);
}

function fit(table) {
  const room = table.parentElement;
  table.classList.remove("stacked");
  table.classList.toggle("stacked",
    room.scrollWidth > room.clientWidth + 1 || squeezed(table));
}

const tables = [...document.querySelectorAll(".table-wrapper > table")]
  .filter((table) => table.tHead);
tables.forEach(prepare);
tables.forEach(fit);
let width = window.innerWidth;
window.addEventListener("resize", () => {
  if (width === window.innerWidth) return;
  width = window.innerWidth;
  tables.forEach(fit);
});

const drawings = "article p > img[src$='.svg']";
for (const picture of document.querySelectorAll(drawings)) {
  picture.parentElement.classList.add("drawing");
}
