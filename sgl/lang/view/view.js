"use strict";
// Links what belongs to one node of a view: pointing at its text marks its bar, and the other way; a click or a tap
// says its facts, which a title says only to who can hover.
function nodeOf(event) { return event.target.closest?.(".sgl-view [data-node]"); }
function mark(element) {
  for (const each of document.querySelectorAll(".sgl-on")) each.classList.remove("sgl-on");
  if (element) for (const each of element.closest(".sgl-view").querySelectorAll(`[data-node="${element.dataset.node}"]`)) each.classList.add("sgl-on");
}
document.addEventListener("pointerover", event => mark(nodeOf(event)));
document.addEventListener("focusin", event => mark(nodeOf(event)));
document.addEventListener("click", event => {
  const element = nodeOf(event);
  if (!element) return;
  const view = element.closest(".sgl-view"), said = element.getAttribute("title") ?? element.querySelector("title").textContent;
  const token = event.target.closest("i[title]"), facts = view.querySelector(".sgl-facts") || view.appendChild(document.createElement("div"));
  facts.className = "sgl-facts";
  facts.textContent = [...(token ? [`${JSON.stringify(token.textContent)} ${token.title}`] : []), ...said.split("\n")].join(" · ");
  mark(element);
  if (element.matches("g")) view.querySelector(`.sgl-text [data-node="${element.dataset.node}"]`)?.scrollIntoView({ block: "nearest" });
});
