//! Patterns of file names, with `*`, `**` and `?`.

/// Whether `path` matches `pattern`. `*` and `?` match within a name, and `**` also matches `/`.
pub(crate) fn matches(pattern: &str, path: &str) -> bool {
    match_bytes(pattern.as_bytes(), path.as_bytes())
}

fn match_bytes(pattern: &[u8], path: &[u8]) -> bool {
    // Positions to return to: the rest of the pattern after its last star, the path from there, and whether the star crosses folders.
    let (mut p, mut s) = (0, 0);
    let mut star: Option<(usize, usize)> = None;
    let mut double: Option<(usize, usize)> = None;
    loop {
        if pattern[p..].starts_with(b"**") {
            p += 2;
            // `**/` also matches no folder.
            if pattern.get(p) == Some(&b'/') && (s == 0 || path[..s].ends_with(b"/")) {
                p += 1;
            }
            (double, star) = (Some((p, s)), None);
        } else if pattern.get(p) == Some(&b'*') {
            p += 1;
            star = Some((p, s));
        } else if s < path.len()
            && (pattern.get(p) == Some(&path[s]) || (pattern.get(p) == Some(&b'?') && path[s] != b'/'))
        {
            (p, s) = (p + 1, s + 1);
        } else if p == pattern.len() && s == path.len() {
            return true;
        } else if let Some((after, from)) = star.filter(|&(_, from)| from < path.len() && path[from] != b'/') {
            star = Some((after, from + 1));
            (p, s) = (after, from + 1);
        } else if let Some((after, from)) = double.filter(|&(_, from)| from < path.len()) {
            (double, star) = (Some((after, from + 1)), None);
            (p, s) = (after, from + 1);
        } else {
            return false;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::matches;

    #[test]
    fn stars_stay_in_a_name_and_two_stars_cross_folders() {
        for (pattern, path, expected) in [
            ("*.parquet", "a.parquet", true),
            ("*.parquet", "data/a.parquet", false),
            ("**/*.parquet", "data/x/a.parquet", true),
            ("**/*.parquet", "a.parquet", true),
            ("data/train-*", "data/train-00000-of-00001.parquet", true),
            ("data/train-?.csv", "data/train-1.csv", true),
            ("data/**", "data/a/b.csv", true),
            ("data/*b*/c*", "data/abc/cd", true),
            ("data", "data/a", false),
            ("", "", true),
            ("a*b*c", "aXbYbZ", false),
        ] {
            assert_eq!(matches(pattern, path), expected, "{pattern} {path}");
        }
    }
}
