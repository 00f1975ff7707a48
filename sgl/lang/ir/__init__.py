"""What a program is made of; under the original language's names here, which its programs import."""

from sgl.lang.ir.nodes import REGEX_BOOL, REGEX_FLOAT, REGEX_INT, REGEX_STR
from sgl.lang.ir.nodes import Arg as SglArgument
from sgl.lang.ir.nodes import Exprs as SglExprList
from sgl.lang.ir.nodes import Fork as SglFork
from sgl.lang.ir.nodes import Gen as SglGen
from sgl.lang.ir.nodes import Media as SglImage
from sgl.lang.ir.nodes import Media as SglVideo
from sgl.lang.ir.nodes import Node as SglExpr
from sgl.lang.ir.nodes import Ref as SglVariable
from sgl.lang.ir.nodes import RoleBegin as SglRoleBegin
from sgl.lang.ir.nodes import RoleEnd as SglRoleEnd
from sgl.lang.ir.nodes import ScopeBegin as SglVarScopeBegin
from sgl.lang.ir.nodes import ScopeEnd as SglVarScopeEnd
from sgl.lang.ir.nodes import Select as SglSelect
from sgl.lang.ir.nodes import Text as SglConstantText

__all__ = [
    "REGEX_BOOL",
    "REGEX_FLOAT",
    "REGEX_INT",
    "REGEX_STR",
    "SglArgument",
    "SglConstantText",
    "SglExpr",
    "SglExprList",
    "SglFork",
    "SglGen",
    "SglImage",
    "SglRoleBegin",
    "SglRoleEnd",
    "SglSelect",
    "SglVarScopeBegin",
    "SglVarScopeEnd",
    "SglVariable",
    "SglVideo",
]
