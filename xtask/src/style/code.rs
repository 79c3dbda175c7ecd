//! Figures about code: long files, functions and closures, and names that the glossary replaces.

use super::modules::is_test_attribute;
use super::{Finding, Source};
use anyhow::Context;
use proc_macro2::{Span, TokenStream, TokenTree};
use std::collections::BTreeSet;
use syn::spanned::Spanned;
use syn::visit::{self, Visit};

/// Largest permitted number of lines of a source file.
const FILE_LINES_MAX: usize = 800;

/// Largest permitted number of lines of a function.
const FUNCTION_LINES_MAX: usize = 80;

/// Largest permitted number of lines within the body of a closure with a name. A longer one should be a function, which
/// has types and a doc comment.
const CLOSURE_LINES_MAX: usize = 3;

/// Tolerated number of files above [`FILE_LINES_MAX`]. Changes of the project may only lower it.
const FILES_LEFT: f64 = 0.0;
/// Tolerated number of functions above [`FUNCTION_LINES_MAX`]. Changes of the project may only lower it.
const FUNCTIONS_LEFT: f64 = 0.0;
/// Tolerated number of closures above [`CLOSURE_LINES_MAX`]. Changes of the project may only lower it.
const CLOSURES_LEFT: f64 = 0.0;

/// Smallest number of arms of a `match` for which a function may be longer than [`FUNCTION_LINES_MAX`]. Such a function
/// must be little more than this `match`: a flat table over ops or keys.
const FLAT_ARMS_MIN: usize = 8;

/// Files that may have any length, because they are generated tables of data.
const DATA_TABLES: &[&str] = &["python/plimsoll/results.py"];

/// Words that no identifier may contain, because a word of `docs/GLOSSARY.md` replaced them.
const REPLACED_WORDS: &[&str] = &[
    "abreast",
    "behind",
    "coarse",
    "crew",
    "dish",
    "elsewhere",
    "errand",
    "insist",
    "lean",
    "leanest",
    "menu",
    "nobody",
    "pulse",
    "rehearsal",
    "rehearse",
    "rehearsed",
    "retreat",
    "retreats",
    "somebody",
    "trouble",
    "whoever",
    "wish",
];

/// Identifiers that are not permitted, because they stood for several concepts, or for a concept that has another name
/// in the field.
const REPLACED_NAMES: &[&str] = &[
    "Answer",
    "Came",
    "Felt",
    "Given",
    "Halt",
    "Known",
    "Laid",
    "Member",
    "Question",
    "Said",
    "Seat",
    "Sharing",
    "Tried",
    "Way",
    "circles",
    "give_way",
    "go_home",
    "goes_by",
    "left_out",
    "made_again",
    "not_rehearsed",
    "rested_seconds",
    "worth",
];

/// Returns the figures about code: long files, functions and closures, and names that the glossary replaces.
///
/// # Errors
/// Fails if a Rust file does not parse.
pub fn findings(sources: &[Source]) -> anyhow::Result<Vec<Finding>> {
    let (mut long_files, mut long_functions) = (Vec::new(), Vec::new());
    let (mut long_closures, mut names) = (Vec::new(), Vec::new());
    for source in sources.iter().filter(|source| source.has_extension(&["rs", "py", "cu", "cuh", "cpp", "h"])) {
        let lines = source.text.lines().count();
        if lines > FILE_LINES_MAX && !DATA_TABLES.contains(&source.path.as_str()) {
            long_files.push(format!("{}: {lines} lines", source.path));
        }
    }
    for source in sources.iter().filter(|source| source.has_extension(&["rs"])) {
        let file = syn::parse_file(&source.text).with_context(|| format!("cannot parse {}", source.path))?;
        let mut functions = LongFunctions { path: &source.path, found: Vec::new() };
        functions.visit_file(&file);
        long_functions.append(&mut functions.found);
        if !source.path.contains("/tests") {
            let mut closures = LongClosures { path: &source.path, found: Vec::new() };
            closures.visit_file(&file);
            long_closures.append(&mut closures.found);
        }
        // The check itself has to name the words.
        if !source.path.ends_with("style/code.rs") {
            let tokens =
                source.text.parse().map_err(|error| anyhow::anyhow!("cannot read {}: {error}", source.path))?;
            let mut found = BTreeSet::new();
            replaced_names(tokens, &mut found);
            names.extend(found.into_iter().map(|(line, name)| format!("{}:{line}: {name}", source.path)));
        }
    }
    Ok(vec![
        Finding { name: "files above 800 lines", of: 0, places: long_files, limit: FILES_LEFT },
        Finding { name: "functions above 80 lines", of: 0, places: long_functions, limit: FUNCTIONS_LEFT },
        Finding { name: "named closures above 3 lines", of: 0, places: long_closures, limit: CLOSURES_LEFT },
        Finding { name: "identifiers that the glossary replaces", of: 0, places: names, limit: 0.0 },
    ])
}

struct LongFunctions<'a> {
    path: &'a str,
    found: Vec<String>,
}

impl LongFunctions<'_> {
    fn look_at(&mut self, name: &syn::Ident, span: Span, body: &syn::Block) {
        let lines = span.end().line - span.start().line + 1;
        if lines > FUNCTION_LINES_MAX && !is_flat(body) {
            self.found.push(format!("{}:{}: {name}: {lines} lines", self.path, name.span().start().line));
        }
    }
}

impl<'ast> Visit<'ast> for LongFunctions<'_> {
    fn visit_item_fn(&mut self, item: &'ast syn::ItemFn) {
        self.look_at(&item.sig.ident, item.block.span(), &item.block);
        visit::visit_item_fn(self, item);
    }

    fn visit_impl_item_fn(&mut self, item: &'ast syn::ImplItemFn) {
        self.look_at(&item.sig.ident, item.block.span(), &item.block);
        visit::visit_impl_item_fn(self, item);
    }
}

/// Finds long closures that a `let` binds, outside test modules.
struct LongClosures<'a> {
    path: &'a str,
    found: Vec<String>,
}

impl<'ast> Visit<'ast> for LongClosures<'_> {
    fn visit_item_mod(&mut self, item: &'ast syn::ItemMod) {
        if !item.attrs.iter().any(is_test_attribute) {
            visit::visit_item_mod(self, item);
        }
    }

    fn visit_local(&mut self, local: &'ast syn::Local) {
        if let Some(init) = &local.init
            && let syn::Expr::Closure(closure) = &*init.expr
        {
            let body = closure.body.span();
            // The first and the last line of a body hold its braces.
            let lines = (body.end().line - body.start().line).saturating_sub(1);
            if lines > CLOSURE_LINES_MAX {
                self.found.push(format!("{}:{}: {lines} lines", self.path, local.span().start().line));
            }
        }
        visit::visit_local(self, local);
    }
}

/// Returns whether a function body ends in a `match` of many arms that makes up most of the body.
fn is_flat(body: &syn::Block) -> bool {
    let whole = body.span().end().line - body.span().start().line;
    let Some(syn::Stmt::Expr(last, _)) = body.stmts.last() else { return false };
    let mut expression = last;
    // `Ok(match … { … })` and `f.pad(match … { … })` are tables, too.
    loop {
        expression = match expression {
            syn::Expr::Call(call) if call.args.len() == 1 => &call.args[0],
            syn::Expr::MethodCall(call) if call.args.len() == 1 => &call.args[0],
            _ => break,
        };
    }
    let syn::Expr::Match(table) = expression else { return false };
    let lines = table.span().end().line - table.span().start().line;
    table.arms.len() >= FLAT_ARMS_MIN && 10 * lines >= 7 * whole
}

/// Adds the identifiers that contain a word of [`REPLACED_WORDS`] or are in [`REPLACED_NAMES`] to `found`, each after
/// its line number.
fn replaced_names(tokens: TokenStream, found: &mut BTreeSet<(usize, String)>) {
    for token in tokens {
        match token {
            TokenTree::Group(group) => replaced_names(group.stream(), found),
            TokenTree::Ident(ident) => {
                let name = ident.to_string();
                let replaced = REPLACED_NAMES.contains(&name.as_str())
                    || words(&name).any(|w| REPLACED_WORDS.contains(&w.as_str()));
                if replaced {
                    found.insert((ident.span().start().line, name));
                }
            }
            TokenTree::Punct(_) | TokenTree::Literal(_) => {}
        }
    }
}

/// Splits a name in `snake_case`, `CamelCase` or `SHOUTING_CASE` into its words, in lower case.
fn words(name: &str) -> impl Iterator<Item = String> {
    let mut words = vec![String::new()];
    let mut before = '_';
    for letter in name.chars() {
        let starts = letter == '_' || letter.is_uppercase() && !before.is_uppercase();
        if starts {
            words.push(String::new());
        }
        if letter != '_' {
            words.last_mut().expect("never empty").extend(letter.to_lowercase());
        }
        before = letter;
    }
    words.into_iter().filter(|word| !word.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn figures(text: &str) -> Vec<usize> {
        let findings = findings(&[Source { path: "a.rs".to_owned(), text: text.to_owned() }]).unwrap();
        findings.iter().map(|finding| finding.places.len()).collect()
    }

    #[test]
    fn names_are_split_into_words() {
        for name in ["ReadAll", "read_all", "READ_ALL"] {
            assert_eq!(Vec::from_iter(words(name)), ["read", "all"]);
        }
    }

    #[test]
    fn long_files_functions_and_replaced_names_are_found() {
        assert_eq!(figures(&"\n".repeat(801)), [1, 0, 0, 0]);
        assert_eq!(figures(&format!("fn f() {{{}}}", "\n".repeat(80))), [0, 1, 0, 0]);
        assert_eq!(figures("fn f() { g!(RetreatKind, retreat_now, Seat, seat) }"), [0, 0, 0, 3]);
    }

    #[test]
    fn long_named_closures_outside_tests_are_found() {
        let lines = |count: usize| "g();\n".repeat(count);
        let closure = |lines: &str| format!("fn f() {{\nlet mut h: X = move |x| {{\n{lines}}};\n}}");
        assert_eq!(figures(&closure(&lines(3))), [0, 0, 0, 0]);
        assert_eq!(figures(&closure(&lines(4))), [0, 0, 1, 0]);
        let nested = format!("{}let i = || X {{\n{}}};\n", lines(1), "y: 0,\n".repeat(4));
        assert_eq!(figures(&closure(&nested)), [0, 0, 2, 0]);
        assert_eq!(figures(&format!("#[cfg(test)]\nmod tests {{\n{}\n}}", closure(&lines(4)))), [0, 0, 0, 0]);
        // A closure without a name is not counted.
        assert_eq!(figures(&format!("fn f() {{\nh(|x| {{\n{}}});\n}}", lines(4))), [0, 0, 0, 0]);
    }

    #[test]
    fn flat_match_may_be_long() {
        let arms =
            |arms: usize| (0..arms).map(|arm| format!("{arm} => {{\n\n\n\n\n\n\n\n\n\n\n}}\n")).collect::<String>();
        assert_eq!(figures(&format!("fn f(x: u8) {{\nmatch x {{\n{}}}}}", arms(8))), [0, 0, 0, 0]);
        assert_eq!(figures(&format!("fn f(x: u8) {{\nmatch x {{\n{}}}}}", arms(7))), [0, 1, 0, 0]);
    }
}
