// A self-contained page: the files that were embedded, opened.
limpet.open(JSON.parse(document.getElementById("data").textContent).files).catch((error) => {
  const problem = document.createElement("p");
  problem.setAttribute("role", "alert");
  problem.textContent = `This page cannot be shown (${error.message}). It needs a browser of 2023 or later.`;
  document.querySelector("main").append(problem);
});
