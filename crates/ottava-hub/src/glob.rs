//! Patterns of file names, with `*`, `**` and `?`.

/// Whether `path` matches `pattern`. `*` and `?` match within a name, and `**` also matches `/`.
pub fn matches(pattern: &str, path: &str) -> bool {
    match_bytes(pattern.as_bytes(), path.as_bytes())
}

/// A `**` of the pattern.
#[derive(Clone, Copy)]
struct Crossing {
    /// The rest of the pattern.
    after: usize,
    /// The position in the path up to which the stars have matched.
    from: usize,
    /// Whether it is `**/`, which matches whole folders only.
    whole: bool,
}

impl Crossing {
    /// Returns the next position up to which the stars can match.
    fn next(&self, path: &[u8]) -> Option<usize> {
        match self.whole {
            true => path[self.from..].iter().position(|byte| *byte == b'/').map(|at| self.from + at + 1),
            false => (self.from < path.len()).then_some(self.from + 1),
        }
    }
}

fn match_bytes(pattern: &[u8], path: &[u8]) -> bool {
    // Positions to return to: the rest of the pattern after its last `*` and after its last `**`, and the position in the path up to which the star has
    // matched.
    let (mut p, mut s) = (0, 0);
    let mut star: Option<(usize, usize)> = None;
    let mut double: Option<Crossing> = None;
    loop {
        if pattern[p..].starts_with(b"**") {
            let starts_name = |at: usize, text: &[u8]| at == 0 || text[at - 1] == b'/';
            // `**/` matches whole folders, or none.
            let whole = pattern.get(p + 2) == Some(&b'/') && starts_name(p, pattern) && starts_name(s, path);
            p += if whole { 3 } else { 2 };
            (double, star) = (Some(Crossing { after: p, from: s, whole }), None);
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
        } else if let Some(from) = double.as_ref().and_then(|double| double.next(path)) {
            let crossing = double.expect("it has a next position");
            (p, s, star) = (crossing.after, from, None);
            double = Some(Crossing { from, ..crossing });
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
            ("**/train.csv", "data/mytrain.csv", false),
            ("**/train.csv", "data/my/train.csv", true),
            ("data/**/x*.csv", "data/a/b/x1.csv", true),
            ("data/**/x*.csv", "data/x1.csv", true),
            ("data/**/x*.csv", "data/ax1.csv", false),
            ("**/a/**/b", "x/a/y/a/b", true),
            ("data**/b", "data1/c/b", true),
            ("data/*b*/c*", "data/abc/cd", true),
            ("data", "data/a", false),
            ("", "", true),
            ("a*b*c", "aXbYbZ", false),
        ] {
            assert_eq!(matches(pattern, path), expected, "{pattern} {path}");
        }
    }
}
