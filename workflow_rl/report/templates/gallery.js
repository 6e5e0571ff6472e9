// Shows the groups that the filters ask for. Without this script all of them are shown.
const filters = document.getElementById("filters");
if (filters) {
  const gallery = document.getElementById("gallery");
  const groups = [...gallery.children];
  const stages = [...filters.elements.stage.options].slice(1).map((option) => option.value);
  const rewardOf = (group) => JSON.parse(group.dataset.rewards)[filters.elements.reward.value];
  const orders = {
    new: (a, b) => b.dataset.iteration - a.dataset.iteration,
    old: (a, b) => a.dataset.iteration - b.dataset.iteration,
    high: (a, b) => (rewardOf(b) ?? -Infinity) - (rewardOf(a) ?? -Infinity),
    low: (a, b) => (rewardOf(a) ?? Infinity) - (rewardOf(b) ?? Infinity),
    credit: (a, b) => b.dataset.credit - a.dataset.credit,
  };

  function matches(group) {
    const { iteration, prompt, kind, low, high } = filters.elements;
    const reward = rewardOf(group);
    return (!iteration.value || group.dataset.iteration === iteration.value)
      && group.dataset.prompt.toLowerCase().includes(prompt.value.trim().toLowerCase())
      && (!kind.value || group.dataset.kind === kind.value
        || (kind.value === "failures" && group.dataset.failures !== "0"))
      && (low.value === "" || (reward !== null && reward >= Number(low.value)))
      && (high.value === "" || (reward !== null && reward <= Number(high.value)));
  }

  function showStage(stage) { // the stages before it stay as captions, the ones after it are hidden
    for (const node of gallery.querySelectorAll("li[data-stage]")) {
      const later = stages.indexOf(node.dataset.stage) - stages.indexOf(stage);
      node.hidden = Boolean(stage) && later > 0;
      node.classList.toggle("compact", Boolean(stage) && later < 0);
    }
  }

  function apply() {
    const { sort, stage, reward, iteration, earlier, later } = filters.elements;
    groups.forEach((group) => { group.hidden = !matches(group); });
    gallery.append(...groups.toSorted(orders[sort.value]));
    showStage(stage.value);
    for (const place of gallery.querySelectorAll("[data-rewards].reward")) {
      place.textContent = JSON.parse(place.dataset.rewards)[reward.value] ?? "–";
    }
    earlier.disabled = iteration.selectedIndex === iteration.length - 1;
    later.disabled = iteration.selectedIndex <= 1;
    const shown = groups.filter((group) => !group.hidden).length;
    document.getElementById("shown").textContent = `${shown} of ${groups.length} groups shown`;
  }

  filters.hidden = false;
  filters.addEventListener("input", apply);
  filters.addEventListener("submit", (event) => event.preventDefault());
  filters.addEventListener("reset", () => setTimeout(apply));
  filters.elements.earlier.addEventListener("click", () => { filters.elements.iteration.selectedIndex += 1; apply(); });
  filters.elements.later.addEventListener("click", () => { filters.elements.iteration.selectedIndex -= 1; apply(); });
  apply();
}
