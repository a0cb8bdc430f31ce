// The arrows that open the navigation have no text: name what they open, for those who cannot see them.
document.addEventListener("DOMContentLoaded", () => {
  for (const summary of document.querySelectorAll(".bd-sidebar-primary summary")) {
    const page = summary.closest("li").querySelector("a").textContent.trim();
    summary.setAttribute("aria-label", `Pages of ${page}`);
  }
});

// The search over the tables of docs/field.md: rows that hold every word are shown.
document.addEventListener("DOMContentLoaded", () => {
  const field = document.getElementById("field-search");
  if (!field) return;
  const rows = [...document.querySelectorAll("#every-port tbody tr")];
  const count = document.getElementById("field-count");
  field.addEventListener("input", () => {
    const words = field.value.toLowerCase().split(/\s+/);
    for (const row of rows) {
      const text = row.closest("section").querySelector("h3").textContent + " " + row.textContent;
      row.hidden = !words.every((word) => text.toLowerCase().includes(word));
    }
    for (const section of document.querySelectorAll("#every-port > section")) {
      section.hidden = !section.querySelector("tbody tr:not([hidden])");
    }
    count.textContent = `${rows.filter((row) => !row.hidden).length} of ${rows.length}`;
  });
});
