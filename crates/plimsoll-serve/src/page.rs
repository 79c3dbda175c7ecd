//! The page and the form of the token, each one document without any further file, and the policy that keeps a browser
//! from loading or sending anything else.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use sha2::{Digest, Sha256};
use std::sync::LazyLock;

const STYLE: &str = include_str!("../page/page.css");
const SCRIPT: &str = include_str!("../page/page.js");
/// The beginning of both documents, up to the end of the head.
const HEAD: &str = include_str!("../page/head.html");
const PAGE: &str = include_str!("../page/page.html");
const LOGIN: &str = include_str!("../page/login.html");

static ASSEMBLED_PAGE: LazyLock<String> = LazyLock::new(|| head("Plimsoll") + &PAGE.replace("{script}", SCRIPT));
static ASSEMBLED_LOGIN: LazyLock<String> = LazyLock::new(|| head("Plimsoll: token") + LOGIN);

/// Returns the beginning of a document with this title.
fn head(title: &str) -> String {
    HEAD.replace("{title}", title).replace("{style}", STYLE)
}

/// Only our style and our script, known by their hashes, and requests to this server. `data:` is the empty icon.
static POLICY: LazyLock<String> = LazyLock::new(|| {
    let [style, script] = [STYLE, SCRIPT].map(source_hash);
    format!(
        "default-src 'none'; style-src {style}; script-src {script}; connect-src 'self'; img-src data:; \
         form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    )
});

fn source_hash(text: &str) -> String {
    format!("'sha256-{}'", STANDARD.encode(Sha256::digest(text)))
}

/// Returns the page that shows snapshots.
pub(crate) fn page() -> &'static str {
    &ASSEMBLED_PAGE
}

/// Returns the page with the form of the token.
pub(crate) fn login_page() -> &'static str {
    &ASSEMBLED_LOGIN
}

/// Returns the value of the header `Content-Security-Policy`.
pub(crate) fn content_security_policy() -> &'static str {
    &POLICY
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_hold_what_the_policy_permits() {
        for (page, kind, text) in [(page(), "style", STYLE), (page(), "script", SCRIPT), (login_page(), "style", STYLE)]
        {
            assert!(page.contains(&format!("<{kind}>{text}</{kind}>")), "{kind}");
            assert_eq!(page.matches(&format!("<{kind}")).count(), 1, "{kind}");
        }
        for (page, title) in [(page(), "Plimsoll"), (login_page(), "Plimsoll: token")] {
            assert!(
                page.starts_with("<!doctype html>\n") && page.contains(&format!("<title>{title}</title>")),
                "{title}"
            );
            assert!(page.ends_with("</body>\n</html>\n") && page.matches("</head>\n<body>").count() == 1, "{title}");
        }
        assert_eq!(login_page().matches("<script").count(), 0);
    }

    #[test]
    fn pages_request_nothing_from_other_sites() {
        // The namespace of SVG is a name, and is never requested.
        let [page, login] = [page(), login_page()].map(|page| page.replace("http://www.w3.org/2000/svg", ""));
        for word in
            ["http:", "https:", "//cdn", "@import", "url(", "<link rel=\"stylesheet", "src=", "style=\"", "innerHTML"]
        {
            assert!(!page.contains(word) && !login.contains(word), "{word}");
        }
    }
}
