// Without this script every video still plays. With it, only the ones in sight hold a decoder
// (browsers lend a page a few dozen), and a button stops them all.
const videos = [...document.querySelectorAll("video")];
const button = document.getElementById("pause");
let paused = matchMedia("(prefers-reduced-motion: reduce)").matches;
const inSight = new Set();

function play(video) {
  if (paused) video.pause();
  else video.play().catch(() => {}); // refused by the browser's autoplay policy: it stays still
}

function keepShape(video) { // so that the page does not jump when the video is released
  video.style.aspectRatio = `${video.videoWidth} / ${video.videoHeight}`;
}

function show(video) {
  if (!video.hasAttribute("src")) {
    video.src = video.dataset.src;
    video.load();
  }
  play(video);
}

function release(video) {
  if (!video.hasAttribute("src")) return;
  video.dataset.src = video.getAttribute("src");
  video.removeAttribute("src");
  video.load();
}

function label() {
  button.textContent = paused ? "Play videos" : "Pause videos";
  button.setAttribute("aria-pressed", String(paused));
}

if (videos.length) {
  const observer = new IntersectionObserver((entries) => {
    for (const { target, isIntersecting } of entries) {
      if (isIntersecting) { inSight.add(target); show(target); }
      else { inSight.delete(target); release(target); }
    }
  }, { rootMargin: "400px" });
  for (const video of videos) {
    if (paused) video.autoplay = false;
    video.addEventListener("loadedmetadata", () => keepShape(video));
    observer.observe(video);
  }
  button.hidden = false;
  label();
  button.addEventListener("click", () => {
    paused = !paused;
    for (const video of videos) video.autoplay = !paused;
    inSight.forEach(play);
    label();
  });
}
