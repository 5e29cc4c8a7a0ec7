// Search in the table of contents. The page is readable without this script; then only the search field is missing.
const box = document.getElementById("contents");
const search = document.getElementById("search");
const found = document.getElementById("found");
const wide = matchMedia("(min-width: 1200px)"); // the same width as in style.css: contents at the left
const groups = [...box.querySelectorAll("details")];
const openAtStart = new Map(groups.map((group) => [group, group.open]));
const plain = (text) => text.normalize("NFKD").replace(/[\u0300-\u036f]/g, "").toLowerCase();

const show = () => {
  const words = plain(search.value).split(/\s+/).filter(Boolean);
  let hits = 0;
  for (const group of groups) {
    const items = [...group.querySelectorAll("li")];
    for (const item of items) item.hidden = !words.every((word) => plain(item.textContent).includes(word));
    const here = items.filter((item) => !item.hidden).length;
    hits += here;
    group.hidden = here === 0;
    group.open = words.length ? here > 0 : openAtStart.get(group);
  }
  box.classList.toggle("searching", words.length > 0);
  found.textContent = words.length ? `${hits} ${hits === 1 ? "heading" : "headings"}` : "";
};

box.open = wide.matches;
wide.addEventListener("change", () => (box.open = wide.matches));
search.hidden = false;
search.addEventListener("input", show);
search.addEventListener("keydown", (event) => {
  if (event.key === "Enter") box.querySelector("details:not([hidden]) li:not([hidden]) a")?.click();
});
addEventListener("keydown", (event) => {
  if (event.key !== "/" || event.target === search) return;
  event.preventDefault();
  box.open = true;
  search.focus();
});
box.addEventListener("click", (event) => {
  if (event.target.closest("a") && !wide.matches) box.open = false;
});
