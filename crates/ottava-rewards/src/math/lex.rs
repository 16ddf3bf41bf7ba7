//! Tokens of an answer in plain text or LaTeX.

use super::MAX_TEXT;
use super::rational::Rational;
use super::units::LETTERS;

/// A piece of an answer.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Token {
    Number(Rational),
    /// Letters, or a sign or command without a meaning here.
    Word(String),
    /// A unit of one letter in upright text.
    Unit(String),
    Pi,
    Infinity,
    Sign(char),
    Frac,
    Sqrt,
    Union,
    Open(Bracket),
    Close(Bracket),
}

/// A kind of brackets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Bracket {
    /// `( )`
    Round,
    /// `[ ]`
    Square,
    /// `\{ \}`
    Set,
    /// `{ }`, which groups in LaTeX.
    Group,
}

/// Commands that change only how a formula looks.
const DROPPED: &[&str] = &["left", "right", "big", "Big", "bigg", "Bigg", "displaystyle", "quad", "qquad"];

/// Commands whose braces are dropped with them.
const TEXT: &[&str] = &["text", "textbf", "textrm", "textit", "mathrm", "mathbf", "mbox", "boxed"];

/// The tokens of `text`, in time linear in it; `None` if it is longer than [`MAX_TEXT`].
pub(crate) fn tokens(text: &str) -> Option<Vec<Token>> {
    if text.len() > MAX_TEXT {
        return None;
    }
    // Bold in Markdown, and the end of a sentence.
    let text = text.trim().trim_end_matches('.').trim_matches('*').trim_end_matches('.');
    let mut lexer = Lexer { rest: text, tokens: Vec::new(), depth: 0, groups: Vec::new() };
    while let Some(next) = lexer.rest.chars().next() {
        lexer.token(next);
    }
    Some(lexer.tokens)
}

struct Lexer<'a> {
    rest: &'a str,
    tokens: Vec<Token>,
    /// Open brackets in which commas separate.
    depth: usize,
    /// Open braces, and whether they are dropped.
    groups: Vec<bool>,
}

impl<'a> Lexer<'a> {
    fn token(&mut self, next: char) {
        if next.is_ascii_digit() || next == '.' && self.rest[1..].starts_with(|c: char| c.is_ascii_digit()) {
            return self.number();
        }
        if next == '\\' {
            return self.command();
        }
        if next.is_alphabetic() && next != 'π' {
            let word = self.take(char::is_alphabetic);
            return self.word(word);
        }
        self.rest = &self.rest[next.len_utf8()..];
        match next {
            '$' | '€' | '£' | '~' => {}
            '°' => self.drop_power(),
            '−' | '–' => self.tokens.push(Token::Sign('-')),
            '×' | '·' => self.tokens.push(Token::Sign('*')),
            '÷' => self.tokens.push(Token::Sign('/')),
            '+' | '-' | '*' | '/' | '^' | ',' | '=' | '%' => self.tokens.push(Token::Sign(next)),
            'π' => self.tokens.push(Token::Pi),
            '∞' => self.tokens.push(Token::Infinity),
            '∪' => self.tokens.push(Token::Union),
            '√' => self.tokens.push(Token::Sqrt),
            '(' => self.open(Bracket::Round),
            '[' => self.open(Bracket::Square),
            '{' => self.open_group(false),
            ')' => self.close(Bracket::Round),
            ']' => self.close(Bracket::Square),
            '}' => self.close_group(),
            space if space.is_whitespace() => {}
            other => self.tokens.push(Token::Word(other.into())),
        }
    }

    /// Takes the characters that satisfy `is_part`.
    fn take(&mut self, is_part: impl Fn(char) -> bool) -> &'a str {
        let (taken, rest) = self.rest.split_at(self.rest.find(|c| !is_part(c)).unwrap_or(self.rest.len()));
        self.rest = rest;
        taken
    }

    fn open(&mut self, bracket: Bracket) {
        self.depth += 1;
        self.tokens.push(Token::Open(bracket));
    }

    fn close(&mut self, bracket: Bracket) {
        self.depth = self.depth.saturating_sub(1);
        self.tokens.push(Token::Close(bracket));
    }

    fn open_group(&mut self, dropped: bool) {
        self.groups.push(dropped);
        if !dropped {
            self.tokens.push(Token::Open(Bracket::Group));
        }
    }

    fn close_group(&mut self) {
        if self.groups.pop() == Some(true) {
            return;
        }
        match self.tokens.last() {
            // Degrees were in the braces.
            Some(Token::Open(Bracket::Group)) => {
                self.tokens.pop();
                self.drop_power();
            }
            _ => self.tokens.push(Token::Close(Bracket::Group)),
        }
    }

    /// Drops the `^` before the sign of degrees.
    fn drop_power(&mut self) {
        self.tokens.pop_if(|last| *last == Token::Sign('^'));
    }

    fn word(&mut self, word: &str) {
        self.tokens.push(match word {
            "pi" => Token::Pi,
            "sqrt" => Token::Sqrt,
            "inf" | "infinity" | "oo" => Token::Infinity,
            letter if LETTERS.contains(&letter) && self.groups.last() == Some(&true) => Token::Unit(letter.into()),
            word => Token::Word(word.into()),
        });
    }

    /// A word after a backslash, or an escaped sign.
    fn command(&mut self) {
        self.rest = &self.rest[1..];
        let name = self.take(|c| c.is_ascii_alphabetic());
        match name {
            "frac" | "dfrac" | "tfrac" | "cfrac" => {
                self.tokens.push(Token::Frac);
                self.digits(2);
            }
            "sqrt" => {
                self.tokens.push(Token::Sqrt);
                self.digits(1);
            }
            "cdot" | "times" => self.tokens.push(Token::Sign('*')),
            "div" => self.tokens.push(Token::Sign('/')),
            "infty" => self.tokens.push(Token::Infinity),
            "cup" => self.tokens.push(Token::Union),
            "circ" | "degree" => self.drop_power(),
            "" => self.escaped(),
            name if TEXT.contains(&name) => {
                if let Some(after) = self.rest.trim_start().strip_prefix('{') {
                    self.rest = after;
                    self.open_group(true);
                }
            }
            name if DROPPED.contains(&name) => {}
            name => self.word(name),
        }
    }

    /// The sign after a backslash: spaces and mathematical delimiters are dropped.
    fn escaped(&mut self) {
        let Some(sign) = self.rest.chars().next() else { return };
        self.rest = &self.rest[sign.len_utf8()..];
        match sign {
            '{' => self.open(Bracket::Set),
            '}' => self.close(Bracket::Set),
            '%' => self.tokens.push(Token::Sign('%')),
            '!' | ',' | ';' | ':' | ' ' | '$' | '(' | ')' | '[' | ']' | '\\' => {}
            sign => self.tokens.push(Token::Word(format!("\\{sign}"))),
        }
    }

    /// Arguments of a command without braces are single digits: `\frac12` is one half.
    fn digits(&mut self, most: usize) {
        for _ in 0..most {
            let after = self.rest.trim_start();
            let Some(digit) = after.chars().next().and_then(|c| c.to_digit(10)) else { return };
            self.rest = &after[1..];
            self.tokens.push(Token::Number(Rational::integer(digit.into())));
        }
    }

    /// Digits with separators of thousands, a fraction and an exponent.
    fn number(&mut self) {
        let begin = self.rest;
        let mut whole = self.take(|c| c.is_ascii_digit()).to_string();
        if (1..=3).contains(&whole.len()) && self.depth == 0 {
            while let Some(after) = thousands(self.rest) {
                let (group, rest) = after.split_at(3);
                whole += group;
                self.rest = rest;
            }
        }
        let mut fraction = "";
        if let Some(after) = self.rest.strip_prefix('.') {
            self.rest = after;
            fraction = self.take(|c| c.is_ascii_digit());
        }
        let exponent = self.exponent();
        self.tokens.push(match Rational::decimal(&whole, fraction, exponent) {
            Some(value) => Token::Number(value),
            None => Token::Word(begin[..begin.len() - self.rest.len()].to_string()),
        });
    }

    /// The exponent of `1.5e3`.
    fn exponent(&mut self) -> i32 {
        let Some(after) = self.rest.strip_prefix(['e', 'E']) else { return 0 };
        let signed = after.strip_prefix(['+', '-']).unwrap_or(after);
        let length = signed.find(|c: char| !c.is_ascii_digit()).unwrap_or(signed.len());
        let ends = !signed[length..].starts_with(char::is_alphabetic);
        let end = after.len() - signed.len() + length;
        match after[..end].parse() {
            Ok(exponent) if ends => {
                self.rest = &after[end..];
                exponent
            }
            _ => 0,
        }
    }
}

/// What follows a separator of thousands, if `rest` begins with one: exactly three digits.
fn thousands(rest: &str) -> Option<&str> {
    let after = [",\\!", "{,}", "\\,", ","].iter().find_map(|separator| rest.strip_prefix(separator))?;
    let digits = after.find(|c: char| !c.is_ascii_digit()).unwrap_or(after.len());
    (digits == 3).then_some(after)
}
