//! Tests that links of documents lead somewhere, that the book has every page, and that images are small.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Component, Path, PathBuf};

/// The maximum size of an image in bytes.
const MOST_IMAGE_BYTES: u64 = 150_000;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().expect("the workspace is there")
}

/// Returns all documents of the project, by their paths from the root.
fn documents() -> BTreeMap<PathBuf, String> {
    let (mut found, mut folders) = (BTreeMap::new(), vec![root()]);
    while let Some(folder) = folders.pop() {
        for path in fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()) {
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            let is_skipped = name.starts_with('.') || ["target", "runs", "shared"].contains(&name.as_ref());
            if path.is_dir() && !is_skipped {
                folders.push(path);
            } else if name.ends_with(".md") && !path.is_dir() {
                let text = fs::read_to_string(&path).unwrap();
                found.insert(path.strip_prefix(root()).unwrap().to_path_buf(), text);
            }
        }
    }
    found
}

/// Returns `text` without fenced blocks and without text between backticks. Line numbers stay the same.
fn prose(text: &str) -> String {
    let (mut found, mut fenced, mut quoted) = (String::new(), false, false);
    for line in text.split_inclusive('\n') {
        if line.trim_start().starts_with("```") {
            fenced = !fenced;
        } else if !fenced {
            quoted &= !line.trim().is_empty();
            for letter in line.chars() {
                match letter {
                    '`' => quoted = !quoted,
                    letter if !quoted || letter == '\n' => found.push(letter),
                    _ => {}
                }
            }
            continue;
        }
        found.push('\n');
    }
    found
}

/// Returns the targets of the links and images in a document.
fn targets(text: &str) -> Vec<String> {
    let prose = prose(text);
    let parts = prose.split("](").skip(1);
    parts.filter_map(|part| Some(part.split_once(')')?.0.split_whitespace().collect::<String>())).collect()
}

/// Returns the anchors of the headings of a document, by the rules of GitHub and mdBook.
fn anchors(text: &str) -> BTreeSet<String> {
    let (mut found, mut fenced) = (BTreeSet::new(), false);
    for line in text.lines() {
        fenced ^= line.trim_start().starts_with("```");
        let heading = line.trim_start_matches('#');
        if fenced || heading.len() == line.len() || !heading.starts_with(' ') {
            continue;
        }
        let letters = heading.trim().to_lowercase();
        let kept = letters.chars().filter(|c| c.is_alphanumeric() || [' ', '-', '_'].contains(c));
        let name: String = kept.map(|c| if c == ' ' { '-' } else { c }).collect();
        let numbered = (1..).map(|i| format!("{name}-{i}"));
        let free = [name.clone()].into_iter().chain(numbered).find(|name| !found.contains(name));
        found.extend(free);
    }
    found
}

/// Returns `path` without `.` and `..`.
fn plain(path: &Path) -> PathBuf {
    let mut parts = PathBuf::new();
    for part in path.components() {
        match part {
            Component::ParentDir => drop(parts.pop()),
            Component::CurDir => {}
            part => parts.push(part),
        }
    }
    parts
}

/// Returns why a link of the document `from` leads nowhere; `None` if it leads somewhere.
fn dead(from: &Path, target: &str, documents: &BTreeMap<PathBuf, String>) -> Option<String> {
    if ["https://", "http://", "mailto:"].iter().any(|start| target.starts_with(start)) {
        return None;
    }
    let (path, anchor) = target.split_once('#').map_or((target, None), |(path, anchor)| (path, Some(anchor)));
    let to = match path {
        "" => from.to_path_buf(),
        path => plain(&from.parent().unwrap_or(Path::new("")).join(path)),
    };
    if !root().join(&to).exists() {
        return Some(format!("there is no {}", to.display()));
    }
    let anchor = anchor?;
    match documents.get(&to) {
        Some(text) if anchors(text).contains(anchor) => None,
        Some(_) => Some(format!("{} has no heading #{anchor}", to.display())),
        None => Some(format!("{} has no headings", to.display())),
    }
}

#[test]
fn every_link_and_anchor_of_the_documents_leads_somewhere() {
    let documents = documents();
    let (mut problems, mut count) = (Vec::new(), 0);
    for (path, text) in &documents {
        for target in targets(text) {
            count += 1;
            problems.extend(dead(path, &target, &documents).map(|why| format!("{}: {target}: {why}", path.display())));
        }
    }
    assert!(problems.is_empty(), "\n{}", problems.join("\n"));
    assert!(count > 100, "{count} links were found");
}

#[test]
fn a_configuration_that_a_page_prints_is_the_file() {
    const WORDS: &str = "This file is `configs/";
    let mut compared = 0;
    for (path, text) in documents() {
        let mut at = 0;
        while let Some(found) = text[at..].find(WORDS) {
            let end = at + found;
            at = end + WORDS.len();
            let name = text[at..].split('`').next().unwrap();
            let block = text[..end].rsplit("```toml\n").next().unwrap().split("```").next().unwrap();
            let file = fs::read_to_string(root().join("configs").join(name)).unwrap();
            let settings: Vec<&str> = file.lines().filter(|line| !line.starts_with('#')).collect();
            assert_eq!(block.trim_end(), settings.join("\n").trim_end(), "{}: {name}", path.display());
            compared += 1;
        }
    }
    assert!(compared > 0, "a page prints a configuration");
}

#[test]
fn dead_links_are_noticed() {
    let text = "# A `b`: c, d_e\n\n## A b c d_e\n[x](b.md#there) [y\nz](../b.md) `[no](link)`\n```\n# no heading\n[no](link)\n```\n![i](i.png)\n## More\n## More\n";
    assert_eq!(targets(text), ["b.md#there", "../b.md", "i.png"]);
    assert_eq!(anchors(text).into_iter().collect::<Vec<_>>(), ["a-b-c-d_e", "a-b-c-d_e-1", "more", "more-1"]);
    let documents =
        BTreeMap::from([("README.md".into(), "# Here\n".to_string()), ("docs/data.md".into(), String::new())]);
    for (target, why) in [
        ("../README.md#here", None),
        ("../README.md", None),
        ("https://example.com/x#y", None),
        ("../README.md#there", Some("README.md has no heading #there")),
        ("README.txt", Some("there is no docs/README.txt")),
        ("#top", Some("docs/data.md has no heading #top")),
        ("../Cargo.toml#x", Some("Cargo.toml has no headings")),
    ] {
        assert_eq!(dead(Path::new("docs/data.md"), target, &documents).as_deref(), why, "{target}");
    }
}

/// Returns the lines in a list of pages that mdBook would not read as a title, a page or a blank line.
fn not_of_a_list(summary: &str) -> Vec<&str> {
    let is_page = |line: &str| {
        let link = line.strip_prefix("- ").unwrap_or(line);
        let parts = link.strip_prefix('[').and_then(|rest| rest.strip_suffix(".md)")?.split_once("]("));
        parts.is_some_and(|(title, page)| !title.is_empty() && !page.contains([' ', '(', ')', '#']))
    };
    let is_title = |line: &str| line.strip_prefix("# ").is_some_and(|title| !title.trim().is_empty());
    summary.lines().filter(|line| !line.is_empty() && !is_title(line) && !is_page(line)).collect()
}

#[test]
fn lines_that_are_no_page_of_the_book_are_noticed() {
    let summary = "# Summary\n\n[Overview](README.md)\n- [Data](data.md)\n";
    assert!(not_of_a_list(summary).is_empty());
    for fault in [
        "- [Data](data.md",
        "- Data",
        "-[Data](data.md)",
        "- [Data](data.html)",
        "- [](data.md)",
        "text",
        "#",
        "- [D](a.md#b)",
    ] {
        assert_eq!(not_of_a_list(&format!("{summary}{fault}\n")), [fault]);
    }
}

/// Tests the rules of `mdbook build`, which runs in `just nightly book`.
#[test]
fn the_book_has_every_page_once_and_images_are_small() {
    let documents = documents();
    let no_lines: [&str; 0] = [];
    assert_eq!(not_of_a_list(&documents[Path::new("docs/SUMMARY.md")]), no_lines, "docs/SUMMARY.md");
    let settings = fs::read_to_string(root().join("book.toml")).unwrap();
    assert!(settings.contains("[book]\n") && settings.contains("\nsrc = \"docs\"\n"), "book.toml names the pages");
    let listed: Vec<PathBuf> =
        targets(&documents[Path::new("docs/SUMMARY.md")]).iter().map(|target| Path::new("docs").join(target)).collect();
    let pages: BTreeSet<_> =
        documents.keys().filter(|path| path.starts_with("docs") && !path.ends_with("SUMMARY.md")).cloned().collect();
    assert_eq!(listed.iter().cloned().collect::<BTreeSet<_>>(), pages, "docs/SUMMARY.md lists the pages of docs");
    assert_eq!(listed.len(), pages.len(), "each page once");
    // Other files of the repository are not in the book, so pages must not link to them by relative paths.
    for page in &pages {
        let outside = targets(&documents[page]).into_iter().find(|target| target.starts_with("../"));
        assert_eq!(outside, None, "{}: a link out of the book; name the file instead", page.display());
    }
    let named: BTreeSet<PathBuf> = documents
        .iter()
        .flat_map(|(path, text)| targets(text).into_iter().map(|target| plain(&path.parent().unwrap().join(target))))
        .collect();
    for image in fs::read_dir(root().join("docs/images")).unwrap().map(|entry| entry.unwrap()) {
        let (path, bytes) = (Path::new("docs/images").join(image.file_name()), image.metadata().unwrap().len());
        assert!(bytes < MOST_IMAGE_BYTES, "{}: {bytes} bytes", path.display());
        assert!(named.contains(&path), "no document shows {}", path.display());
    }
}
