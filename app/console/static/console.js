"use strict";
// Opens acts in the dialog, copies commands, and moves by keys. Without scripts every link and form works as well.
(() => {
  const dialog = () => document.getElementById("dialog");

  document.addEventListener("htmx:afterSwap", (event) => {
    if (event.detail.target !== dialog()) return;
    dialog().showModal();
    const field = dialog().querySelector("[autofocus]");
    if (field) field.focus();
  });

  // A refusal is a page of its own: follow the link instead of leaving the click without an effect.
  document.addEventListener("htmx:responseError", (event) => {
    const link = event.detail.elt.closest("a[href]");
    if (link) window.location.assign(link.href);
  });

  document.addEventListener("click", (event) => {
    const closing = event.target.closest("dialog [data-close]");
    if (closing) {
      event.preventDefault();
      dialog().close();
      return;
    }
    const copying = event.target.closest("[data-copy]");
    if (!copying || !navigator.clipboard) return;
    navigator.clipboard.writeText(document.getElementById(copying.dataset.copy).textContent).then(() => {
      copying.textContent = "Copied";
      setTimeout(() => { copying.textContent = "Copy"; }, 1500);
    });
  });

  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input, textarea, select")) return;
    if (event.key === "/") {
      const field = document.querySelector("input[type=search], form.filters input:not([type=hidden])");
      if (field) { event.preventDefault(); field.focus(); }
    }
  });
})();
