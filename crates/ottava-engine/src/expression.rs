//! Regular expressions in the syntax that Python and ECMAScript share. Clients of other servers write this syntax, and llguidance reads the syntax of the
//! crate regex, in which some texts mean something else: `[a&&b]` is the intersection of two classes there, and `[\d-x]` is an error.
//!
//! As in ECMAScript, `\d` and `\w` are ASCII characters. `\s` is white space of ASCII, and `\S` is no white space of Unicode, so texts match in both languages.

use std::iter::Peekable;
use std::str::Chars;

/// The classes that have a letter as name: the letter, the characters of the class, and the characters that are not in the class with the capital letter.
const CLASSES: &[(char, &str, &str)] = &[
    ('d', "0-9", "0-9"),
    ('w', "0-9A-Za-z_", "0-9A-Za-z_"),
    (
        's',
        "\\x{9}-\\x{d}\\x{20}",
        "\\x{9}-\\x{d}\\x{1c}-\\x{20}\\x{85}\\x{a0}\\x{1680}\\x{2000}-\\x{200a}\\x{2028}\\x{2029}\\x{202f}\\x{205f}\\x{3000}\\x{feff}",
    ),
];

/// The maximum length of the name of a class, such as `:alpha:`.
const MOST_NAME: usize = 16;

/// What an escape in a class stands for.
enum Item {
    Char(char),
    /// A set of characters in the notation of the crate regex.
    Set(String),
}

/// Writes a character in the notation of the crate regex, also within a class.
pub fn escaped(c: char) -> String {
    if c.is_ascii_alphanumeric() { c.to_string() } else { format!("\\x{{{:x}}}", u32::from(c)) }
}

/// Writes a text in the notation of the crate regex.
pub fn literal(text: &str) -> String {
    text.chars().map(escaped).collect()
}

/// Returns the class `\d`, `\w` or `\s`, or with a capital letter the characters that are not in it. `is_negated` says whether the class is part of a
/// class that is negated.
pub fn class_of(letter: char, is_negated: bool) -> Option<String> {
    let (_, inside, outside) = CLASSES.iter().find(|(name, ..)| *name == letter.to_ascii_lowercase())?;
    let is_capital = letter.is_ascii_uppercase();
    let set = if is_capital == is_negated { inside } else { outside };
    Some(if is_capital { format!("[^{set}]") } else { format!("[{set}]") })
}

/// Returns a class that is not negated in which `\s` and `\S` are exact complements if it has both, so that `[\s\S]` is any character. The entries of
/// the class are in the notation of [`class_of`] and [`escaped`].
pub fn completed(mut class: String) -> String {
    for (letter, inside, _) in CLASSES {
        let of = |letter| class_of(letter, false).expect("the letter names a class");
        if class.contains(&of(*letter)) {
            class = class.replace(&of(letter.to_ascii_uppercase()), &format!("[^{inside}]"));
        }
    }
    class
}

/// Translates an expression into the syntax of the crate regex. Errors with the reason and the place if the expression has something that cannot be
/// enforced while a text is generated: assertions about the text around a place, groups and quantifiers without backtracking, references to groups, and
/// escapes that do not exist.
pub fn translate(expression: &str) -> Result<String, String> {
    Reader::new(expression, false).translate()
}

/// The `pattern` of a JSON schema.
#[derive(Debug, PartialEq)]
pub struct Pattern {
    /// The pattern in the syntax of the crate regex.
    pub text: String,
    /// Whether something is left out, so that texts may not match the pattern of the schema.
    pub is_weaker: bool,
}

/// Translates the `pattern` of a JSON schema, as [`Grammars::json`](crate::Grammars::json) reads it. Assertions, such as `(?!…)` and `\b`, are left out, and
/// `(?>…)` and `a++` become groups and quantifiers with backtracking.
/// Errors with the reason and the place if the pattern has a reference to a group, or cannot be read.
pub fn pattern(expression: &str) -> Result<Pattern, String> {
    let mut reader = Reader::new(expression, true);
    let text = reader.translate()?;
    Ok(Pattern { text, is_weaker: reader.has_left_out })
}

struct Reader<'a> {
    chars: Peekable<Chars<'a>>,
    /// The number of characters that were read.
    at: usize,
    /// Whether assertions, and groups and quantifiers without backtracking, are left out, or are errors.
    leaves_out: bool,
    has_left_out: bool,
}

impl Reader<'_> {
    fn new(expression: &str, leaves_out: bool) -> Reader<'_> {
        Reader { chars: expression.chars().peekable(), at: 0, leaves_out, has_left_out: false }
    }

    fn translate(&mut self) -> Result<String, String> {
        let mut text = String::new();
        while let Some(c) = self.next() {
            text += &self.element(c)?;
        }
        Ok(text)
    }

    /// Reads the element that begins with `c`.
    fn element(&mut self, c: char) -> Result<String, String> {
        Ok(match c {
            '\\' => match self.escape(false)? {
                Item::Char(c) => escaped(c),
                Item::Set(set) => set,
            },
            '[' => self.class()?,
            '(' => self.group()?,
            '{' => match self.repetition() {
                Some(repetition) => self.quantifier(repetition)?,
                // A brace that begins no repetition is a character.
                None => escaped('{'),
            },
            '*' | '+' | '?' => self.quantifier(c.into())?,
            c => c.into(),
        })
    }

    /// Reads what makes a quantifier possessive. Such a quantifier has fewer texts.
    fn quantifier(&mut self, text: String) -> Result<String, String> {
        if self.chars.next_if_eq(&'+').is_some() {
            self.at += 1;
            self.leave_out("possessive quantifiers")?;
        }
        Ok(text)
    }

    fn next(&mut self) -> Option<char> {
        let c = self.chars.next()?;
        self.at += 1;
        Some(c)
    }

    fn starts_with(&self, text: &str) -> bool {
        let mut rest = self.chars.clone();
        text.chars().all(|c| rest.next() == Some(c))
    }

    fn skip(&mut self, count: usize) {
        for _ in 0..count {
            self.next();
        }
    }

    /// A sentence about the character that was read last.
    fn wrong(&self, reason: &str) -> String {
        format!("the regular expression, at character {}: {reason}", self.at)
    }

    /// Reads an escape after its backslash.
    fn escape(&mut self, is_negated: bool) -> Result<Item, String> {
        let Some(c) = self.next() else { return Err(self.wrong("a `\\` has nothing after it")) };
        if let Some(set) = class_of(c, is_negated) {
            return Ok(Item::Set(set));
        }
        Ok(Item::Char(match c {
            'n' => '\n',
            't' => '\t',
            'r' => '\r',
            'f' => '\u{c}',
            'v' => '\u{b}',
            'a' => '\u{7}',
            'e' => '\u{1b}',
            '0' if self.chars.peek().is_some_and(char::is_ascii_digit) => {
                return Err(self.wrong("octal codes are not implemented; write `\\x` and two digits"));
            }
            '0' => '\0',
            'x' => self.code(2)?,
            'u' => self.code(4)?,
            'U' => self.code(8)?,
            'c' => match self.next().filter(char::is_ascii_alphabetic) {
                Some(letter) => char::from(letter as u8 % 32),
                None => return Err(self.wrong("`\\c` is followed by a letter")),
            },
            'p' | 'P' => return Ok(Item::Set(self.property(c))),
            // The whole text must match, so `\A` and `\z` hold at its ends.
            'A' => return Ok(Item::Set("\\A".into())),
            'z' | 'Z' => return Ok(Item::Set("\\z".into())),
            'b' | 'B' => return self.leave_out("boundaries of words").map(|()| Item::Set("(?:)".into())),
            '1'..='9' | 'k' => {
                return Err(self.wrong("references to groups are not implemented; write the group again"));
            }
            c if c.is_ascii_alphabetic() => return Err(self.wrong(&format!("there is no escape `\\{c}`"))),
            c => c,
        }))
    }

    /// Reads the code of a character: `digits` digits, or digits in braces.
    fn code(&mut self, digits: usize) -> Result<char, String> {
        let has_braces = self.chars.next_if_eq(&'{').is_some();
        let mut text = String::new();
        while let Some(c) = self.chars.next_if(|c| c.is_ascii_hexdigit() && (has_braces || text.len() < digits)) {
            text.push(c);
        }
        self.at += text.len();
        let is_complete = if has_braces { self.chars.next_if_eq(&'}').is_some() } else { text.len() == digits };
        self.at += 2 * usize::from(has_braces);
        let code = u32::from_str_radix(&text, 16).ok().filter(|_| is_complete).and_then(char::from_u32);
        code.ok_or_else(|| self.wrong("the code of a character is wrong"))
    }

    /// Reads a property of Unicode, such as `\p{L}`. The crate regex tells if there is no such property.
    fn property(&mut self, kind: char) -> String {
        let mut text = format!("\\{kind}");
        let has_braces = self.chars.peek() == Some(&'{');
        while let Some(c) = self.next() {
            text.push(c);
            if !has_braces || c == '}' {
                break;
            }
        }
        text
    }

    /// Notes that something is left out. Errors if it must not be left out.
    fn leave_out(&mut self, are: &str) -> Result<(), String> {
        self.has_left_out = true;
        match self.leaves_out {
            true => Ok(()),
            false => Err(self.wrong(&format!("{are} are not implemented; leave them out"))),
        }
    }

    /// Reads what follows the bracket of a group.
    fn group(&mut self) -> Result<String, String> {
        const ASSERTIONS: &[&str] = &["?=", "?!", "?<=", "?<!"];
        if ASSERTIONS.iter().any(|start| self.starts_with(start)) {
            self.leave_out("assertions about the text before or after a place")?;
            // Brackets are counted without recursion, because clients choose their depth.
            let mut open = 1;
            while let Some(c) = self.next() {
                match c {
                    '\\' => self.skip(1),
                    '[' => drop(self.class()?),
                    '(' => open += 1,
                    ')' if open == 1 => return Ok("(?:)".into()),
                    ')' => open -= 1,
                    _ => {}
                }
            }
            return Err(self.wrong("a group has no `)` at its end"));
        }
        if self.starts_with("?P=") {
            return Err(self.wrong("references to groups are not implemented; write the group again"));
        }
        if self.starts_with("?>") {
            self.leave_out("groups without backtracking")?;
            self.skip(2);
            return Ok("(?:".into());
        }
        Ok("(".into())
    }

    /// Reads a repetition after its brace; `None` if the brace begins no repetition.
    fn repetition(&mut self) -> Option<String> {
        let inside: String = self.chars.clone().take_while(|&c| c.is_ascii_digit() || c == ',').collect();
        let is_closed = self.chars.clone().nth(inside.len()) == Some('}');
        let is_number = |text: &str| !text.is_empty() && !text.contains(',');
        let repetition = match inside.split_once(',') {
            None => is_number(&inside).then(|| format!("{{{inside}}}")),
            Some(("", most)) => is_number(most).then(|| format!("{{0,{most}}}")),
            Some((least, "")) => is_number(least).then(|| format!("{{{least},}}")),
            Some((least, most)) => (is_number(least) && is_number(most)).then(|| format!("{{{least},{most}}}")),
        };
        let repetition = repetition.filter(|_| is_closed)?;
        self.skip(inside.len() + 1);
        Some(repetition)
    }

    /// Reads a class after its bracket.
    fn class(&mut self) -> Result<String, String> {
        let start = self.wrong("a class has no `]` at its end");
        let is_negated = self.chars.next_if_eq(&'^').is_some();
        self.at += usize::from(is_negated);
        // ECMAScript's class without exceptions.
        if is_negated && self.chars.peek() == Some(&']') && !self.chars.clone().skip(1).any(|c| c == ']') {
            self.skip(1);
            return Ok("(?s:.)".into());
        }
        let mut text = String::from(if is_negated { "[^" } else { "[" });
        let mut is_first = true;
        loop {
            let item = match self.next() {
                None => return Err(start),
                Some(']') if !is_first => break,
                // In Python, a bracket at the beginning is a character.
                Some(c) => self.item(c, is_negated)?,
            };
            is_first = false;
            match item {
                Item::Set(set) => {
                    text += &set;
                    // A set begins no range, so a hyphen after it is a character.
                    if self.chars.next_if_eq(&'-').is_some() {
                        self.at += 1;
                        text += &escaped('-');
                    }
                }
                Item::Char(first) => text += &self.range(first, is_negated)?,
            }
        }
        text.push(']');
        Ok(if is_negated { text } else { completed(text) })
    }

    /// Reads an entry of a class that begins with `c`.
    fn item(&mut self, c: char, is_negated: bool) -> Result<Item, String> {
        if c == '[' && self.starts_with(":") {
            let name: String = self.chars.clone().take_while(|&c| c != ']').take(MOST_NAME).collect();
            if name.len() > 2 && name.ends_with(':') {
                self.skip(name.chars().count() + 1);
                return Ok(Item::Set(format!("[{name}]")));
            }
        }
        match c {
            '\\' if self.chars.next_if_eq(&'b').is_some() => {
                self.at += 1;
                Ok(Item::Char('\u{8}'))
            }
            '\\' => match self.chars.peek() {
                Some(place @ ('A' | 'B' | 'Z' | 'z')) => {
                    let reason = format!("`\\{place}` is no character, so a class cannot have it");
                    Err(self.wrong(&reason))
                }
                _ => self.escape(is_negated),
            },
            c => Ok(Item::Char(c)),
        }
    }

    /// Reads the rest of a range of characters that may begin with `first`.
    fn range(&mut self, first: char, is_negated: bool) -> Result<String, String> {
        let mut ahead = self.chars.clone();
        if ahead.next() != Some('-') || ahead.next().is_none_or(|c| c == ']') {
            return Ok(escaped(first));
        }
        self.skip(1);
        let c = self.next().expect("a character follows the hyphen");
        match self.item(c, is_negated)? {
            Item::Char(last) if last < first => Err(self.wrong("a range begins after its end")),
            Item::Char(last) => Ok(format!("{}-{}", escaped(first), escaped(last))),
            Item::Set(set) => Ok(format!("{}{}{set}", escaped(first), escaped('-'))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn expressions_mean_the_same_as_in_python_and_ecmascript() {
        for (text, expected) in [
            (r"^a+?b*(c|d){2,3}$", r"^a+?b*(c|d){2,3}$"),
            (r"\d[\d.-]", r"[0-9][[0-9]\x{2e}\x{2d}]"),
            (r"[^\d][^\D]\D\s[^\S]", r"[^[0-9]][^[^0-9]][^0-9][\x{9}-\x{d}\x{20}][^[^\x{9}-\x{d}\x{20}]]"),
            (r"[\d-x][a-\d][-a][a-]", r"[[0-9]\x{2d}x][a\x{2d}[0-9]][\x{2d}a][a\x{2d}]"),
            (r"[a&&b][[c][!--a][~~]", r"[a\x{26}\x{26}b][\x{5b}c][\x{21}-\x{2d}a][\x{7e}\x{7e}]"),
            (r"[]a][^]][[:alpha:]_][\]-a]", r"[\x{5d}a][^\x{5d}][[:alpha:]\x{5f}][\x{5d}-a]"),
            (r"a[^]", "a(?s:.)"),
            (r"\<\é\/\x41\u00e4\u{1f600}\cA\0\e[\b]", r"\x{3c}\x{e9}\x{2f}A\x{e4}\x{1f600}\x{1}\x{0}\x{1b}[\x{8}]"),
            (r"a{,3}b{2}c{2,}d{e{,}", r"a{0,3}b{2}c{2,}d\x{7b}e\x{7b},}"),
            (r"\p{L}\pN(?P<n>b)(?i:c)\Z", r"\p{L}\pN(?P<n>b)(?i:c)\z"),
            (r"[\s\S][\S\s]", r"[[\x{9}-\x{d}\x{20}][^\x{9}-\x{d}\x{20}]][[^\x{9}-\x{d}\x{20}][\x{9}-\x{d}\x{20}]]"),
            (r"[\d\D][\w\W]", "[[0-9][^0-9]][[0-9A-Za-z_][^0-9A-Za-z_]]"),
            (r"\++a{2}?b{+", r"\x{2b}+a{2}?b\x{7b}+"),
            ("", ""),
        ] {
            assert_eq!(translate(text).as_deref(), Ok(expected), "{text}");
        }
        // No character is in both, so no character is in neither.
        let none = translate(r"[^\s\S]").unwrap();
        assert!(none.starts_with("[^[\\x{9}-\\x{d}\\x{1c}-") && none.ends_with("[^\\x{9}-\\x{d}\\x{20}]]"), "{none}");
        // White space of ASCII is in `\s`, and white space of Unicode is not in `\S`.
        for (text, has_unicode) in [(r"\s", false), (r"[^\S]", false), (r"\S", true), (r"[^\s]", true)] {
            assert_eq!(translate(text).unwrap().contains("\\x{3000}"), has_unicode, "{text}");
        }
        assert_eq!(translate(&literal("a\\[ü]")).unwrap(), literal("a\\[ü]"));
    }

    #[test]
    fn patterns_leave_assertions_out() {
        for (text, expected) in [
            (r"^(?!^[-+.]*$)[+-]?\d$", r"^(?:)[\x{2b}\x{2d}]?[0-9]$"),
            (r"a(?=(b[)](?:c)|\)(?<!d)))e\bf", r"a(?:)e(?:)f"),
            (r"(?>a|ab)c", "(?:a|ab)c"),
            (r"a++b*+c?+d{2}+e", "a+b*c?d{2}e"),
        ] {
            assert_eq!(pattern(text), Ok(Pattern { text: expected.into(), is_weaker: true }), "{text}");
        }
        assert_eq!(pattern("^a"), Ok(Pattern { text: "^a".into(), is_weaker: false }));
        assert!(pattern(&"(?=".repeat(100_000)).unwrap_err().contains("a group has no `)`"));
        assert!(pattern("a(?=b").unwrap_err().contains("a group has no `)`"));
    }

    #[test]
    fn what_is_not_enforced_is_told_with_its_place() {
        for (text, words) in [
            (r"a(?=b)", "at character 2: assertions"),
            (r"(?<!b)a", "at character 1: assertions"),
            (r"\bfoo", "at character 2: boundaries of words"),
            (r"(a)\1", "at character 5: references to groups"),
            (r"(?P<a>b)(?P=a)", "at character 9: references to groups"),
            (r"a\h", r"at character 3: there is no escape `\h`"),
            (r"a\", r"at character 2: a `\` has nothing"),
            (r"\xg", "at character 2: the code of a character"),
            (r"\u{110000}", "at character 10: the code of a character"),
            (r"a[bc", "at character 2: a class has no `]`"),
            (r"[]", "at character 1: a class has no `]`"),
            (r"[b-a]", "at character 4: a range begins"),
            (r"(?>a)", "at character 1: groups without backtracking"),
            (r"a++", "at character 3: possessive quantifiers"),
            (r"a{1,2}+", "at character 7: possessive quantifiers"),
            (r"[\B]", r"at character 2: `\B` is no character"),
            (r"[^a-\A]", r"at character 5: `\A` is no character"),
            (r"[\Z]", r"at character 2: `\Z` is no character"),
            (r"\01", "at character 2: octal codes"),
            (r"[\07]", "at character 3: octal codes"),
            (r"\c1", r"at character 3: `\c` is followed"),
        ] {
            let error = translate(text).unwrap_err();
            assert!(error.contains(words), "{text}: {error}");
        }
    }
}
