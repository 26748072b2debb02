// Ranks the search's results: guides before pages of reasons and references.
const FIRST = /^docs\/(quickstart|concepts|troubleshooting|python_api)$/;
const LAST = /^(README|CONTRIBUTING|docs\/(decisions|http_api|performance))$/;

var Scorer = {
  // As Sphinx has them.
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
  score: ([page, , , , score]) =>
    score + (FIRST.test(page) ? 4 : 0) - (LAST.test(page) ? 4 : 0),
};
