//! Compares the declared kernels with the kernel files, without a compiler: runs a small preprocessor on every variant of every source, and reads the
//! signatures of `extern "C" __global__` functions from its output.

use crate::cuda::{Arg, CudaDevice, Entry, GpuModel, KernelModule, Kind, Parameter, Signature, Source};
use crate::ops::kernels;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::panic::AssertUnwindSafe;

/// A `#define` of a kernel file, or a macro of a variant.
#[derive(Clone)]
struct Macro {
    /// `None` for macros without parentheses.
    parameters: Option<Vec<String>>,
    body: Vec<String>,
    /// Macros of a variant define types and sizes. Declarations use their names, so these macros are expanded only in conditions.
    is_variant: bool,
}

/// Splits a text into identifiers, numbers, and single other characters, without spaces.
fn tokens(text: &str) -> Vec<String> {
    let is_word = |c: char| c.is_alphanumeric() || c == '_';
    let mut tokens: Vec<String> = Vec::new();
    let mut joins = false;
    for c in text.chars() {
        match tokens.last_mut() {
            Some(last) if joins && is_word(c) => last.push(c),
            _ if !c.is_whitespace() => tokens.push(c.to_string()),
            _ => {}
        }
        joins = is_word(c);
    }
    tokens
}

/// Returns the lines of a text without comments. Continued lines are joined.
fn lines(text: &str) -> Vec<String> {
    let mut without = String::new();
    for (i, part) in text.split("/*").enumerate() {
        without += if i == 0 { part } else { part.split_once("*/").expect("a comment ends").1 };
    }
    let joined = without.replace("\\\n", " ");
    joined.lines().map(|line| line.split("//").next().unwrap_or("").trim().to_string()).collect()
}

#[derive(Default)]
struct Preprocessor {
    macros: HashMap<String, Macro>,
    /// For each open condition: whether its lines are read, and whether a branch of it was read.
    open: Vec<(bool, bool)>,
    read: Vec<String>,
}

impl Preprocessor {
    fn of(module: &KernelModule) -> Preprocessor {
        let mut this = Preprocessor::default();
        let constants = module.source.constants.iter().map(|(name, value)| (*name, value.to_string()));
        let defines = module.defines.iter().map(|(name, value)| (*name, value.to_string()));
        let arch = ("__CUDA_ARCH__", "900".to_string());
        for (name, value) in constants.chain(defines).chain([arch]) {
            this.macros.insert(name.into(), Macro { parameters: None, body: tokens(&value), is_variant: true });
        }
        for line in lines(module.source.text) {
            this.line(&line);
        }
        assert!(this.open.is_empty(), "{}: a condition does not end", module.source.name);
        this
    }

    fn line(&mut self, line: &str) {
        let is_active = self.open.iter().all(|(is_read, _)| *is_read);
        let Some(directive) = line.strip_prefix('#') else {
            if is_active {
                let expanded = self.expand(&tokens(line), &BTreeSet::new());
                self.read.extend(expanded);
            }
            return;
        };
        let directive = directive.trim();
        let (word, rest) = directive.split_once(char::is_whitespace).unwrap_or((directive, ""));
        match word {
            "ifdef" | "ifndef" => {
                let holds = self.macros.contains_key(rest.trim()) == (word == "ifdef");
                self.open.push((holds, holds));
            }
            "if" => {
                let holds = is_active && self.holds(rest);
                self.open.push((holds, holds));
            }
            "elif" => {
                let holds = self.holds(rest);
                let (is_read, was_read) = self.open.last_mut().expect("an open condition");
                (*is_read, *was_read) = (holds && !*was_read, *was_read || holds);
            }
            "else" => {
                let (is_read, was_read) = self.open.last_mut().expect("an open condition");
                *is_read = !*was_read;
            }
            "endif" => drop(self.open.pop().expect("an open condition")),
            "define" if is_active => self.define(rest),
            "undef" if is_active => drop(self.macros.remove(rest.trim())),
            "define" | "undef" | "pragma" => {}
            other => panic!("the directive `#{other}` is not implemented"),
        }
    }

    fn define(&mut self, rest: &str) {
        let end = rest.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(rest.len());
        let (name, rest) = rest.split_at(end);
        let (parameters, body) = match rest.strip_prefix('(') {
            Some(rest) => {
                let (parameters, body) = rest.split_once(')').expect("parameters end");
                (Some(parameters.split(',').map(|name| name.trim().to_string()).collect()), body)
            }
            None => (None, rest),
        };
        self.macros.insert(name.into(), Macro { parameters, body: tokens(body), is_variant: false });
    }

    /// Expands macros in `tokens`. Macros in `hidden` are being expanded and stay.
    fn expand(&self, tokens: &[String], hidden: &BTreeSet<&str>) -> Vec<String> {
        let mut expanded = Vec::new();
        let mut at = 0;
        while let Some(token) = tokens.get(at) {
            at += 1;
            let Some((name, found)) = self.macros.get_key_value(token).filter(|(name, found)| {
                let is_called = found.parameters.is_none() || tokens.get(at).is_some_and(|next| next == "(");
                !found.is_variant && !hidden.contains(name.as_str()) && is_called
            }) else {
                expanded.push(token.clone());
                continue;
            };
            let mut body = found.body.clone();
            if let Some(parameters) = &found.parameters {
                let (arguments, end) = arguments(tokens, at);
                at = end;
                let of = |token: &String| parameters.iter().position(|name| name == token);
                let replace = |token: String| of(&token).map_or(vec![token], |place| arguments[place].clone());
                body = body.into_iter().flat_map(replace).collect();
            }
            let mut hidden = hidden.clone();
            hidden.insert(name);
            expanded.extend(self.expand(&body, &hidden));
        }
        expanded
    }

    /// Returns whether a condition of `#if` holds.
    fn holds(&self, condition: &str) -> bool {
        let tokens = self.resolved(&tokens(condition));
        let mut parser = Condition { tokens: &tokens };
        let value = parser.choice();
        assert!(parser.tokens.is_empty(), "the condition `{condition}` is not implemented: {:?}", parser.tokens);
        value != 0
    }

    /// Replaces all macros of a condition, including the macros of the variant, and `defined(NAME)` by 0 or 1.
    fn resolved(&self, tokens: &[String]) -> Vec<String> {
        let mut resolved = Vec::new();
        let mut rest = tokens.iter();
        while let Some(token) = rest.next() {
            if token == "defined" {
                let [_, name, _] = [rest.next(), rest.next(), rest.next()];
                let name = name.expect("a name in parentheses");
                resolved.push(i32::from(self.macros.contains_key(name)).to_string());
                continue;
            }
            match self.macros.get(token) {
                Some(found) if found.body != [token.clone()] => resolved.extend(self.resolved(&found.body)),
                _ => resolved.push(token.clone()),
            }
        }
        resolved
    }
}

/// A recursive-descent parser of a condition of `#if`. The value of a name that is not a macro is 0.
struct Condition<'a> {
    tokens: &'a [String],
}

impl Condition<'_> {
    fn takes(&mut self, operator: &[&str]) -> bool {
        let is_next = self.tokens.len() >= operator.len() && self.tokens.iter().zip(operator).all(|(a, b)| a == b);
        if is_next {
            self.tokens = &self.tokens[operator.len()..];
        }
        is_next
    }

    fn choice(&mut self) -> i64 {
        let condition = self.any();
        if !self.takes(&["?"]) {
            return condition;
        }
        let first = self.choice();
        assert!(self.takes(&[":"]), "a choice has two values");
        let second = self.choice();
        if condition != 0 { first } else { second }
    }

    fn any(&mut self) -> i64 {
        let mut value = self.all();
        while self.takes(&["|", "|"]) {
            value = i64::from((self.all() != 0) | (value != 0));
        }
        value
    }

    fn all(&mut self) -> i64 {
        let mut value = self.comparison();
        while self.takes(&["&", "&"]) {
            value = i64::from((self.comparison() != 0) & (value != 0));
        }
        value
    }

    fn comparison(&mut self) -> i64 {
        let value = self.value();
        if self.takes(&["=", "="]) {
            i64::from(value == self.value())
        } else if self.takes(&["!", "="]) {
            i64::from(value != self.value())
        } else if self.takes(&["<", "="]) {
            i64::from(value <= self.value())
        } else if self.takes(&[">", "="]) {
            i64::from(value >= self.value())
        } else {
            value
        }
    }

    fn value(&mut self) -> i64 {
        if self.takes(&["!"]) {
            return i64::from(self.value() == 0);
        }
        if self.takes(&["("]) {
            let value = self.choice();
            assert!(self.takes(&[")"]), "parentheses close");
            return value;
        }
        let (token, rest) = self.tokens.split_first().expect("a condition has a value");
        self.tokens = rest;
        token.parse().unwrap_or_default()
    }
}

/// Returns the arguments in the parentheses that open at `at`, and the index after them.
fn arguments(tokens: &[String], at: usize) -> (Vec<Vec<String>>, usize) {
    assert_eq!(tokens[at], "(");
    let (mut arguments, mut depth) = (vec![Vec::new()], 0);
    for (i, token) in tokens.iter().enumerate().skip(at) {
        depth += match token.as_str() {
            "(" | "{" => 1,
            ")" | "}" => -1,
            _ => 0,
        };
        match token.as_str() {
            ")" if depth == 0 => return (arguments, i + 1),
            "," if depth == 1 => arguments.push(Vec::new()),
            "(" if i == at => {}
            _ => arguments.last_mut().expect("one at least").push(token.clone()),
        }
    }
    panic!("parentheses do not close: {:?}", &tokens[at..]);
}

/// Returns the type of a C++ parameter as Rust writes it, such as `*const X`.
fn type_of(parameter: &[String]) -> String {
    let (_name, words) = parameter.split_last().expect("a parameter has a name");
    let is_pointer = words.iter().any(|word| word == "*");
    let is_constant = words.iter().any(|word| word == "const");
    let plain = |word: &&str| !["*", "const", "__restrict__", "__grid_constant__"].contains(word);
    let base = words.iter().map(String::as_str).filter(plain).collect::<Vec<_>>().join(" ");
    let base = match base.as_str() {
        "int" => "i32",
        "unsigned" => "u32",
        "long long" => "i64",
        "float" => "f32",
        "double" => "f64",
        "unsigned char" => "u8",
        "unsigned short" => "u16",
        other => other,
    };
    match (is_pointer, is_constant) {
        (true, true) => format!("*const {base}"),
        (true, false) => format!("*mut {base}"),
        (false, _) => base.to_string(),
    }
}

/// Returns the parameter types of each kernel of a module, by the name of the kernel.
fn signatures(module: &KernelModule) -> BTreeMap<String, Vec<String>> {
    let tokens = Preprocessor::of(module).read;
    let kernel = ["extern", "\"", "C", "\"", "__global__", "void"];
    let mut found = BTreeMap::new();
    for start in (0..tokens.len()).filter(|&i| tokens[i..].iter().take(kernel.len()).eq(kernel.iter())) {
        let mut at = start + kernel.len();
        // Attributes such as `__launch_bounds__(256)`.
        while tokens[at].starts_with("__") {
            at = arguments(&tokens, at + 1).1;
        }
        let (parameters, _) = arguments(&tokens, at + 1);
        found.insert(tokens[at].clone(), parameters.iter().map(|parameter| type_of(parameter)).collect());
    }
    found
}

#[test]
fn declared_kernels_are_the_kernels_of_the_files() {
    let mut unseen = BTreeSet::new();
    let mut seen = BTreeSet::new();
    for module in kernels() {
        let (name, declared) = (module.source.name, module.source.signatures);
        let names = declared.iter().flat_map(|signature| signature.names.iter().copied());
        unseen.extend(names.map(|kernel| (declared.as_ptr() as usize, name, kernel)));
        let found = signatures(&module);
        assert!(!found.is_empty(), "{name} with {:?} has no kernel", module.defines);
        for (kernel, parameters) in found {
            let signature = declared.iter().find(|signature| signature.names.contains(&kernel.as_str()));
            let signature =
                signature.unwrap_or_else(|| panic!("the op `{name}` does not declare its kernel `{kernel}`"));
            let expected: Vec<_> = module.parameters(signature).map(|parameter| parameter.of).collect();
            assert_eq!(
                expected, parameters,
                "`{kernel}` of {name} with {:?} {:?}: declared and in the file",
                module.source.macros, module.defines
            );
            seen.insert((declared.as_ptr() as usize, kernel));
        }
    }
    let missing = unseen.iter().find(|(at, _, kernel)| !seen.contains(&(*at, kernel.to_string())));
    assert_eq!(missing, None, "declared, but in no file");
}

/// A kernel file with the features of real kernel files: an attribute, parameters in macros, an alternative, and a macro that defines kernels.
static PLANTED: Source = Source {
    macros: &["CAPS"],
    signatures: &[Signature {
        names: &["planted"],
        parameters: &[
            Parameter { name: "y", of: "*mut X", kind: Kind::Pointer, only_with: None },
            Parameter { name: "n", of: "i32", kind: Kind::I32, only_with: None },
            Parameter { name: "cap", of: "f32", kind: Kind::F32, only_with: Some("CAPS") },
            Parameter { name: "bias", of: "*const X", kind: Kind::Pointer, only_with: Some("CENTERED") },
        ],
    }],
    ..Source::bare(
        "planted",
        r#"#define CAPS 1
            #ifdef CAPS // parameters
            #define AND_CAP , float cap
            #else
            #define AND_CAP
            #endif
            extern "C" __global__ void __launch_bounds__(256, (X_BITS + 2)) planted(X* __restrict__ y, int n AND_CAP) {}
            #if X_BITS == 16 && !defined(OTHER)
            #define KERNEL(NAME, CACHE) extern "C" __global__ void \
                NAME(CACHE cache, const unsigned char* codes, unsigned short* rest, long long at, const __grid_constant__ Parts parts) {}
            KERNEL(one, const KV*)
            KERNEL(two, const __grid_constant__ TensorMap)
            #elif X_BITS == 32
            extern "C" __global__ void three(double d, u64 n) {}
            #endif"#,
    )
};

#[test]
fn signatures_are_read_as_the_preprocessor_leaves_them() {
    let read = |bits| {
        let defines = match bits {
            16 => &[("X", "bf16"), ("X_BITS", "16")],
            _ => &[("X", "f32"), ("X_BITS", "32")],
        };
        signatures(&KernelModule { source: &PLANTED, defines })
    };
    let expected = |kernels: &[(&str, &[&str])]| -> BTreeMap<String, Vec<String>> {
        let owned = |types: &[&str]| types.iter().map(|name| name.to_string()).collect();
        kernels.iter().map(|(name, types)| (name.to_string(), owned(types))).collect()
    };
    let planted: (&str, &[&str]) = ("planted", &["*mut X", "i32", "f32"]);
    let one: (&str, &[&str]) = ("one", &["*const KV", "*const u8", "*mut u16", "i64", "Parts"]);
    let two: (&str, &[&str]) = ("two", &["TensorMap", "*const u8", "*mut u16", "i64", "Parts"]);
    assert_eq!(read(16), expected(&[planted, one, two]));
    assert_eq!(read(32), expected(&[planted, ("three", &["f64", "u64"])]));
}

#[test]
fn a_launch_that_does_not_fit_its_declaration_panics() {
    let launch = |name: &'static str, args: &[Arg]| {
        let kernel = PLANTED.kernel(&[], Entry { name, args: args.to_vec() });
        let gpu = CudaDevice::dry(GpuModel::h200());
        // SAFETY: a dry run enqueues nothing.
        let outcome = std::panic::catch_unwind(AssertUnwindSafe(|| unsafe { gpu.launch(&kernel, [1; 3], 32, 0) }));
        outcome.map(Result::unwrap).map_err(|panic| *panic.downcast::<String>().expect("a message"))
    };
    let (y, n, cap) = (Arg::Ptr(64), Arg::I32(5), Arg::F32(0.5));
    assert_eq!(launch("planted", &[y, n, cap]), Ok(()));
    let swapped = "`planted` takes `y: *mut X`, and the launch passes Some(I32(5))";
    assert_eq!(launch("planted", &[n, y, cap]), Err(swapped.into()));
    let missing = "`planted` takes `cap: f32`, and the launch passes None";
    assert_eq!(launch("planted", &[y, n]), Err(missing.into()));
    let wide = "`planted` takes `n: i32`, and the launch passes Some(I64(5))";
    assert_eq!(launch("planted", &[y, Arg::I64(5), cap]), Err(wide.into()));
    assert!(launch("planted", &[y, n, cap, y]).unwrap_err().contains("more arguments"));
    assert_eq!(launch("other", &[]), Err("the op `planted` declares no kernel `other`".into()));
}
