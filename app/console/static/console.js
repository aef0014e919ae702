"use strict";
// Opens acts in the dialog, copies commands, moves by keys, and keeps pages live. Without scripts every link and form
// works as well.
(() => {
  const dialog = () => document.getElementById("dialog");

  document.addEventListener("htmx:afterSwap", (event) => {
    if (event.detail.target !== dialog()) return;
    const link = event.detail.requestConfig.elt.closest("a[href]");
    // The session is over: the answer is the sign-in, which leads to the act's own page.
    if (link && !dialog().firstElementChild) { window.location.assign(link.href); return; }
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

  // A second click while the answer is on its way must not act twice. A page that comes back can be sent again.
  document.addEventListener("submit", (event) => {
    if (event.target.method !== "post") return;
    if (event.target.dataset.sent) event.preventDefault();
    event.target.dataset.sent = "yes";
  });
  window.addEventListener("pageshow", () => {
    for (const form of document.querySelectorAll("form[data-sent]")) delete form.dataset.sent;
  });

  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input, textarea, select")) return;
    if (event.key === "/") {
      const field = document.querySelector("input[type=search], form.filters input:not([type=hidden])");
      if (field) { event.preventDefault(); field.focus(); }
    }
  });

  // A live page loads itself again whenever the state of the service has changed. While a person types, selects text or
  // has an act open it waits. A hidden tab has no stream: browsers open few connections to one host.
  const main = () => document.getElementById("main");
  const events = main() && main().dataset.live;
  const AGAIN_MS = 2000, CONNECT_AGAIN_MS = 10000;
  let source = null, seen = "", loading = false, waiting = 0, connecting = 0;

  const show = (isLive) => {
    const sign = document.getElementById("live");
    const text = isLive ? "Live" : "Not live: the service does not answer";
    if (sign.hidden || sign.textContent !== text) {
      sign.className = `live state ${isLive ? "good" : "bad"}`;
      sign.textContent = text;
      sign.hidden = false;
    }
  };

  const isInUse = () =>
    dialog().open || !window.getSelection().isCollapsed ||
    (main().contains(document.activeElement) && document.activeElement.matches("input, select, textarea"));

  const replace = (next) => {
    const all = (selector) => [...main().querySelectorAll(selector)];
    const focused = main().contains(document.activeElement) && document.activeElement.getAttribute("href");
    const opened = all("details").map((one) => one.open);
    const scrolled = all(".scroll").map((one) => one.scrollLeft);
    main().replaceChildren(...next.childNodes);
    window.htmx.process(main());
    const details = all("details"), tables = all(".scroll");
    if (details.length === opened.length) details.forEach((one, at) => { one.open = opened[at]; });
    if (tables.length === scrolled.length) tables.forEach((one, at) => { one.scrollLeft = scrolled[at]; });
    const link = focused && all("a[href]").find((one) => one.getAttribute("href") === focused);
    if (link) link.focus({ preventScroll: true });
  };

  const load = async () => {
    clearTimeout(waiting);
    if (loading || document.hidden) return;
    if (isInUse()) { waiting = setTimeout(load, AGAIN_MS); return; }
    loading = true;
    try {
      const answer = await fetch(window.location.href, { headers: { accept: "text/html" } });
      if (answer.redirected) { window.location.reload(); return; }
      const page = new DOMParser().parseFromString(await answer.text(), "text/html");
      if (!answer.ok) show(false);
      else if (isInUse()) waiting = setTimeout(load, AGAIN_MS);
      else replace(page.getElementById("main"));
    } catch {
      show(false);
    } finally {
      loading = false;
    }
  };

  const disconnect = () => {
    clearTimeout(connecting);
    if (source) source.close();
    source = null;
  };

  const connect = () => {
    disconnect();
    source = new EventSource(seen ? `${events}?after=${encodeURIComponent(seen)}` : events);
    source.addEventListener("open", () => show(true));
    source.addEventListener("stats", (event) => {
      // The page itself is as new as the first state.
      const isFirst = !seen;
      seen = event.lastEventId;
      show(true);
      if (!isFirst) load();
    });
    source.addEventListener("unavailable", (event) => { seen = event.lastEventId; show(false); });
    source.addEventListener("error", () => {
      // After a lost connection the browser connects again, after a refusal it does not. A stream's usual end is no
      // fault, so the sign changes only if connecting fails.
      if (source && source.readyState === EventSource.CLOSED) {
        show(false);
        connecting = setTimeout(connect, CONNECT_AGAIN_MS);
      } else {
        connecting = setTimeout(() => { if (source && source.readyState !== EventSource.OPEN) show(false); }, CONNECT_AGAIN_MS);
      }
    });
  };

  if (events && window.EventSource) {
    document.addEventListener("visibilitychange", () => { if (document.hidden) disconnect(); else connect(); });
    if (!document.hidden) connect();
  }
})();
