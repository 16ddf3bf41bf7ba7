//! Tests that comments and pages repeat the noun. A reader understands "the scale of the weight and the scale of the input" at once. If a pronoun
//! replaces the second noun, the reader must look back. This test counts such back-references (the lists below) and limits their density.
//!
//! `cargo test -p ottava --test tidy words -- --nocapture` prints the numbers.

use super::source::{crates, files, root};
use std::fs;

/// The maximum number of back-references per 1,000 words, for pages and for the comments of each crate.
const BOUND: f64 = 0.1;

/// The name for the pages of `docs/` and of the root. In other folders, comments are counted. Measurements in `benchmarks/` are excluded, because
/// they are a record.
const PAGES: &str = "pages";

/// Words after "those" that show that it replaces a noun.
const AFTER_THOSE: &[&str] = &[
    "of", "that", "which", "who", "whose", "in", "on", "at", "from", "for", "with", "without", "by", "before", "after",
    "above", "below", "between", "among", "beside", "behind", "to",
];

/// Words before and after "that" that show that it replaces a noun, as in "faster than that, in BF16" without the comma.
const AROUND_THAT: [&[&str]; 2] = [
    &["than", "from", "as", "to", "with", "by", "of", "is", "are", "equal", "equals", "and", "or"],
    &["in", "on", "at", "for", "from", "with", "by", "before", "after", "above", "below"],
];

/// Returns the number of words of a back-reference at the start of `words`; 0 if there is none. Punctuation within it ends the phrase.
fn back_reference(words: &[&str]) -> usize {
    let outside = |c: char| !c.is_alphanumeric();
    let first = |at: usize| words.get(at).map_or("", |word| word.trim_start_matches(outside));
    let last = |at: usize| words.get(at).map_or("", |word| word.trim_end_matches(outside));
    let found = match (first(0), last(1)) {
        ("that", second) => ["of", "which"].contains(&second),
        ("those", second) => AFTER_THOSE.contains(&second),
        ("of", second) => ["those", "which"].contains(&second),
        ("the", second) => ["latter", "former"].contains(&second),
        _ => false,
    };
    let [before, after] = AROUND_THAT;
    match found {
        true => 2,
        false if words.get(1) == Some(&"that") && before.contains(&first(0)) && after.contains(&last(2)) => 3,
        false => 0,
    }
}

/// Returns the numbers of words and of back-references in a text.
fn count(text: &str) -> [usize; 2] {
    let text = text.to_lowercase();
    let words: Vec<&str> = text.split_whitespace().collect();
    let (mut at, mut found) = (0, 0);
    while at < words.len() {
        let length = back_reference(&words[at..]);
        found += usize::from(length > 0);
        at += length.max(1);
    }
    [words.iter().filter(|word| word.contains(char::is_alphabetic)).count(), found]
}

/// Returns the lines of comments in a source file. Other lines end a phrase.
fn comments(text: &str) -> String {
    let line = |line: &str| match line.trim_start().strip_prefix("//") {
        Some(comment) => format!("{}\n", comment.trim_start_matches(['/', '!'])),
        None => "|\n".to_string(),
    };
    text.lines().map(line).collect()
}

/// Returns the lines of a page without fenced blocks.
fn prose(text: &str) -> String {
    let mut fenced = false;
    let line = |line: &str| {
        let is_fence = line.trim_start().starts_with("```");
        fenced ^= is_fence;
        if fenced || is_fence || line.trim().is_empty() { "|\n".to_string() } else { format!("{line}\n") }
    };
    text.lines().map(line).collect()
}

/// Returns the texts of [`PAGES`] or of a crate, with their paths.
fn texts(what: &str) -> Vec<(String, String)> {
    if what != PAGES {
        let sources = files(what, &["rs", "cu", "cuh"]);
        return sources.iter().map(|file| (file.path.display().to_string(), comments(&file.text))).collect();
    }
    let pages = files("docs", &["md"]).into_iter().map(|file| (file.path.display().to_string(), prose(&file.text)));
    let of_root = fs::read_dir(root()).expect("the workspace is there").map(|entry| entry.expect("an entry").path());
    let of_root = of_root.filter(|path| path.extension().is_some_and(|end| end == "md"));
    let of_root = of_root.map(|path| (path.display().to_string(), fs::read_to_string(&path).expect("a page")));
    pages.chain(of_root.map(|(path, text)| (path, prose(&text)))).collect()
}

#[test]
fn comments_and_pages_repeat_the_noun() {
    let comments = crates().into_iter().map(|krate| format!("crates/{krate}"));
    for what in std::iter::once(PAGES.to_string()).chain(comments) {
        let counts = texts(&what).into_iter().map(|(path, text)| (count(&text), path));
        let mut counts: Vec<_> = counts.collect();
        counts.sort_by_key(|([_, found], _)| std::cmp::Reverse(*found));
        let [words, found] = [0, 1].map(|at| counts.iter().map(|(count, _)| count[at]).sum::<usize>());
        let density = 1000.0 * found as f64 / words as f64;
        println!("{what}: {found} back-references in {words} words, {density:.2} per 1,000");
        let worst: Vec<_> = counts.iter().take(5).map(|([_, found], path)| format!("{path} ({found})")).collect();
        let worst = worst.join(", ");
        assert!(
            density <= BOUND,
            "{what}: {density:.2} back-references per 1,000 words, {BOUND} are the most; repeat the noun instead of \"that of\", \
             \"those of\", \"of which\" or \"the latter\", for example in {worst}"
        );
    }
}

#[test]
fn back_references_are_counted() {
    for (text, found) in [
        ("the scale of x, and that of y", 1),
        ("those\nof the ranks (those who wait), of which one leads", 3),
        ("The latter is faster than that in BF16.", 2),
        ("a scale that in later steps falls, so that of course nothing moves", 1),
        ("those. Of ranks that wait, of\n|\nwhich", 0),
        ("the words of a sentence which follows", 0),
    ] {
        assert_eq!(count(text)[1], found, "{text}");
    }
    assert_eq!(comments("let x = 1;\n/// those\n    //! of\nlet y; // those of").trim(), "|\n those\n of\n|");
    assert_eq!(prose("a\n```\nthose of\n```\nb"), "a\n|\n|\n|\nb\n");
}
