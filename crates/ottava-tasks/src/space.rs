//! White space as Python defines it.

/// Whether Python's `str.strip` removes a character.
pub(crate) fn is_python_space(c: char) -> bool {
    c.is_whitespace() || ('\x1c'..='\x1f').contains(&c)
}

/// Returns the number of words: the parts between runs of white space, which may be empty at the ends of the text.
pub(crate) fn words(text: &str) -> usize {
    let starts_run = |(before, c): (char, char)| is_python_space(c) && !is_python_space(before);
    1 + std::iter::once('.').chain(text.chars()).zip(text.chars()).filter(|pair| starts_run(*pair)).count()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Expected values from `len(re.split(r"\s+", text))`.
    #[test]
    fn words_are_between_runs_of_white_space() {
        assert_eq!(["", "a", "a b", " a \tb\n", "\x1fa"].map(words), [1, 1, 2, 4, 2]);
    }
}
