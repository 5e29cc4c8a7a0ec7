// Turns the slides. Without this script a browser still prints them.
const slides = [...document.querySelectorAll(".slide")];
const notes = [...document.querySelectorAll("aside")];
const bar = document.querySelector("progress");
let now = 0;

const show = (index) => {
  now = Math.max(0, Math.min(slides.length - 1, index));
  slides.forEach((slide, place) => slide.classList.toggle("current", place === now));
  notes.forEach((note, place) => note.classList.toggle("current", place === now));
  bar.value = now + 1;
  history.replaceState(null, "", `#${now + 1}`);
};

// The largest letters with which everything is inside the slide. A wide formula or listing gets smaller before the rest.
const fit = (slide) => {
  const shown = slide.querySelector(".shown");
  for (let size = slide.querySelector("img") ? 1 : 1.3; size >= 0.5; size -= 0.05) {
    slide.style.setProperty("--fit", size.toFixed(2));
    for (const wide of shown.querySelectorAll(".formula, pre")) {
      wide.style.setProperty("--own", 1);
      wide.style.setProperty("--own", wide.scrollWidth > wide.clientWidth ? (0.96 * wide.clientWidth) / wide.scrollWidth : 1);
    }
    if (shown.scrollHeight <= shown.clientHeight && shown.scrollWidth <= shown.clientWidth) return;
  }
};

const keys = {
  ArrowRight: () => show(now + 1),
  ArrowDown: () => show(now + 1),
  PageDown: () => show(now + 1),
  " ": () => show(now + 1),
  ArrowLeft: () => show(now - 1),
  ArrowUp: () => show(now - 1),
  PageUp: () => show(now - 1),
  Home: () => show(0),
  End: () => show(slides.length - 1),
  n: () => document.body.classList.toggle("notes"),
  f: () => (document.fullscreenElement ? document.exitFullscreen() : document.documentElement.requestFullscreen()),
};

addEventListener("keydown", (event) => {
  const action = keys[event.key] ?? keys[event.key.toLowerCase()];
  if (!action || event.ctrlKey || event.metaKey || event.altKey) return;
  event.preventDefault();
  action();
});
document.querySelector("main").addEventListener("click", (event) => {
  if (event.target.closest(".slide")) show(now + (event.clientX < innerWidth / 3 ? -1 : 1));
});
addEventListener("hashchange", () => show(Number(location.hash.slice(1)) - 1));
addEventListener("load", () => slides.forEach(fit));
show(Number(location.hash.slice(1) || 1) - 1);
