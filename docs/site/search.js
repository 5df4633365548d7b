// Split a hit in the text of a page into its sections: show "page > heading", and link to the heading.
const findPages = Search.performTermsSearch;
Search.performTermsSearch = (terms, excluded) =>
  findPages(terms, excluded).flatMap(([page, title, anchor, description, score, file, kind]) => {
    const wanted = [...terms];
    const rated = (SECTIONS[page] || []).map(([heading, id, words]) => ({
      heading, id, found: wanted.filter((term) => `${heading.toLowerCase()} ${words}`.includes(term)).length,
    }));
    const most = Math.max(0, ...rated.map((section) => section.found));
    const best = rated.filter((section) => most > 0 && section.found === most).slice(0, 3);
    if (!best.length) return [[page, title, anchor, description, score, file, kind]];
    return best.map(({ heading, id }) => [
      page, heading === title ? title : `${title} > ${heading}`, `#${id}`, description, score, file, kind,
    ]);
  });
