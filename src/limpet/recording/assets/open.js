// A self-contained page shows its embedded files, at their last frame.
limpet.open(limpet.data.files).then(() => limpet.go(Infinity), (error) => {
  const problem = limpet.make("p", "", `This page cannot be shown (${error.message}). It needs a browser of 2023 or later.`);
  problem.setAttribute("role", "alert");
  document.querySelector("main").append(problem);
});
